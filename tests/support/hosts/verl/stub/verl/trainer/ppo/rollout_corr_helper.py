def compute_rollout_correction_and_add_to_batch(batch, rollout_corr_config):
    return batch, {"rollout_corr/kl": 0.0}


def apply_bypass_mode(batch, rollout_corr_config=None, policy_loss_config=None):
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
