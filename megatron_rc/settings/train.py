"""How a job trains: optimizer, steps, head, checkpoints, and the warm-up before."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rc.schema.choice import Choice
from megatron_rc.schema.limits import check_at_least, check_positive
from megatron_rc.settings.head import Head, HeadOptions, WiderDtype
from megatron_rc.settings.model import Dtype

CONTROLS = {
    "none": "",
    "random-mask": "as many tokens are dropped, at random, and the others have weight 1.",
    "shuffled-weights": "weights and drops change places at random.",
    "mean-weight": "all tokens are kept, with the mean weight of the batch.",
}
Control = Annotated[str, Choice(CONTROLS)]


@dataclass(frozen=True, kw_only=True)
class WarmupSettings:
    """Supervised steps on the task's demonstrations before reinforcement learning."""

    steps: int = 0
    """Most optimizer steps of the warm-up; 0 starts with reinforcement learning."""
    batch_size: int = 256
    """Demonstrations per step."""
    lr: float = 1e-3
    """Learning rate of the warm-up."""
    target_accuracy: float | None = None
    """The warm-up stops early when the held-out accuracy reaches this share; null never stops it early."""
    check_interval: int = 25
    """Steps between two measurements of that accuracy."""

    def __post_init__(self) -> None:
        check_at_least(0, steps=self.steps)
        check_at_least(1, batch_size=self.batch_size, check_interval=self.check_interval)
        check_positive(lr=self.lr)
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise ValueError(f"target_accuracy must be in (0, 1], got {self.target_accuracy!r}")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    steps: int = 100
    """Rollout steps of reinforcement learning."""
    seed: int = 1
    """Seed for initial weights, data order and sampling."""
    dtype: Dtype = "fp32"
    """Precision of the trained model; log-probs, ratios and losses are fp32 whatever it is."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is fused when Apex or TransformerEngine is installed; sgd has no momentum."""
    lr: float = 1e-4
    """Learning rate after its warm-up."""
    min_lr: float = 0.0
    """Learning rate at which lr_decay_style ends."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of Megatron's OptimizerParamScheduler over the optimizer steps of the job."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the learning rate grows linearly to `lr`."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Number added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    grad_cosine: bool = False
    """Measure the cosine of the gradients of consecutive optimizer steps, the metric of that name. Each rank keeps a
    copy of its gradient, 4 bytes per parameter."""
    asynchronous: int = 0
    """Rollouts of this many later steps may be sampled while a step trains, by weights at most as many versions older
    than those that they train; 0 samples and trains in turn."""
    keep_sampling_weights: bool = False
    """Split the gap between trainer and sampler into mismatch and staleness. With rollout.lag N or asynchronous
    N, N + 1 copies of the trained weights are kept in host memory, and N are written with every checkpoint. Each older
    version in a rollout takes one more forward pass. A weight with staleness_upper keeps them in any case."""
    control: Control = "none"
    """Applies what the correction does to other tokens, to see whether its choice matters; to other turns or sequences
    where the correction judges those as a whole."""
    mini_batches_per_rollout: int = 1
    """Optimizer steps per rollout step, each on its own groups."""
    micro_batches: int | None = None
    """Micro-batches per mini-batch and data-parallel rank; null takes as few as `max_tokens_per_microbatch` allows."""
    max_tokens_per_microbatch: int = 8192
    """Packed tokens per micro-batch; a longer sequence gets a micro-batch of its own."""
    eval_interval: int = 10
    """Steps between two held-out evaluations, whose answers come from the engine of the rollouts."""
    eval_weights: Literal["served", "trained"] = "served"
    """Weights that answer the held-out prompts. served: those of the rollouts, with their lag and noise. trained:
    those of the trainer, served by the embedded engine for the time of the evaluation, without `rollout.hidden`."""
    eval_samples: int = 1
    """Answers sampled per held-out prompt, at the rollout temperature."""
    save_interval: int = 50
    """Steps between two checkpoints; 0 saves none, and a job that is stopped starts over."""
    keep_checkpoints: int = 2
    """Checkpoints to keep; older ones are deleted."""
    keep_steps: tuple[int, ...] = ()
    """Steps of reinforcement learning whose checkpoints are written and kept in any case, so that other runs can
    branch from them."""
    head: Head = "logits"
    """What log-probs are made of. logits: the model's logits of all tokens of a micro-batch. linear: its hidden states
    and the weight of its head, a few thousand tokens with a loss at a time, so that no tensor has as many elements as
    tokens times vocabulary. Without an old pass (correction.old) backward computes these logits again."""
    head_chunk: int | None = None
    """With head linear: tokens whose logits exist at a time. null: 4096, halved while their logits take more than
    640 MiB, but not below 1024. Fewer take less memory, and add to the gradient of the weight more often."""
    head_logits_dtype: WiderDtype | None = None
    """With head linear: fp32 does not round the logits of a chunk before the softmax, and takes 4 bytes more for each
    of them; null keeps them in `dtype`."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """Backend of log-probs, correction and loss; auto takes the Triton kernels on GPUs and plain PyTorch on CPU."""
    debug_checks: bool = False
    """Check token ids, kept ids and sequence offsets on the device, too; each check waits for the device."""
    save_hf: bool = True
    """Write the final weights as a Hugging Face checkpoint to OUTPUT/hf."""

    def __post_init__(self) -> None:
        check_positive(lr=self.lr, adam_eps=self.adam_eps)
        not_negative = ("steps", "min_lr", "lr_warmup_steps", "weight_decay", "clip_grad", "save_interval")
        check_at_least(0, **{name: getattr(self, name) for name in not_negative}, asynchronous=self.asynchronous)
        self.head_options()
        counts = ("mini_batches_per_rollout", "max_tokens_per_microbatch", "eval_interval", "eval_samples")
        check_at_least(1, **{name: getattr(self, name) for name in counts}, keep_checkpoints=self.keep_checkpoints)
        if self.keep_steps and not self.save_interval:
            raise ValueError("keep_steps must be empty when save_interval is 0, which saves no checkpoint")
        if self.micro_batches is not None:
            check_at_least(1, micro_batches=self.micro_batches)
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must be <= lr, got min_lr={self.min_lr!r} lr={self.lr!r}")

    def head_options(self) -> HeadOptions:
        return HeadOptions(self.head, self.head_chunk, self.head_logits_dtype)
