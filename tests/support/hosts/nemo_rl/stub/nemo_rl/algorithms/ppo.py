def setup(master_config, tokenizer, dataset, val_dataset, processor=None):
    return "ppo"
