from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class MegatronEngine:
    def _build_lr_scheduler(self):
        return OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=100,
            lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant",
        )  # fmt: skip
