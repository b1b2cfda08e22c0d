from nemo_rl.models.policy.lm_policy import Policy


def setup(master_config, tokenizer, dataset, val_dataset, processor=None, policy_factory=None):
    make = policy_factory if policy_factory is not None else Policy
    arguments = {"cluster": None, "config": master_config.policy, "tokenizer": tokenizer, "processor": processor}
    return make(**arguments, weights_path=None, optimizer_path=None, init_optimizer=True, init_reference_model=True)
