from nemo_rl.models.megatron import setup


class MegatronPolicyWorkerImpl:
    def __init__(
        self, config, tokenizer, weights_path=None, optimizer_path=None, init_optimizer=True,
        init_reference_model=True, *, worker_sharding_annotations, skip_weight_load=False, **kwargs,
    ):  # fmt: skip
        self.scheduler = setup.setup_model_and_optimizer()[1] if init_optimizer else None
