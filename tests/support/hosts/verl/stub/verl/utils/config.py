def validate_config(config, use_reference_policy, use_critic):
    return "validated"
