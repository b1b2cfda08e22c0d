import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class MegatronEngine:
    def _build_lr_scheduler(self):
        return OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=100,
            lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant",
        )  # fmt: skip

    def _maybe_enable_fused_kernels(self):
        if self.engine_config.use_fused_kernels:
            self.engine_config.use_fused_kernels = not self.is_value_model and not self.model_config.mtp.enable


class MegatronEngineWithLMHead(MegatronEngine):
    def _lm_head_logits_processor(
        self, logits, label, temperature, *, calculate_sum_pi_squared, calculate_entropy, distillation_use_topk,
        distillation_only, logits_processor_func, batch, data_format,
    ):  # fmt: skip
        shards = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, logits.detach())
        shards[dist.get_rank()] = logits
        log_softmax = (torch.cat(shards, -1) / temperature.unsqueeze(-1)).log_softmax(-1)
        answer = {"log_probs": log_softmax.gather(-1, label.unsqueeze(-1)).squeeze(-1)}
        if calculate_entropy:
            answer["entropy"] = -(log_softmax.exp() * log_softmax).sum(-1)
        return answer
