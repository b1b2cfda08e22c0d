def setup_single_controller(master_config, tokenizer, *, processor=None, partition_id="rollout_data"):
    return "single controller"
