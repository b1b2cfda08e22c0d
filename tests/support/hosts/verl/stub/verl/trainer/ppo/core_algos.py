def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None):
    assert loss_agg_mode == "token-mean"
    return (loss_mat * loss_mask).sum() / batch_num_tokens * dp_size


def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
    losses = -advantages * (log_prob - old_log_prob).exp()
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {"actor/ppo_kl": 0.0}


def get_policy_loss_fn(name):
    return {"vanilla": plain}[name]
