def compute_rollout_correction_and_add_to_batch(batch, rollout_corr_config):
    return batch, {"rollout_corr/kl": 0.0}
