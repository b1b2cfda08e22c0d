"""Every setting of a training job, with its default; the YAML of `megatron-rc train` has these fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_rc import schema
from megatron_rc.config import RolloutCorrection
from megatron_rc.lr_decay import LengthDecaySettings

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    hf_path: str | None = None
    """Directory with config.json and safetensors to start from; null builds `config` with random weights."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of a Hugging Face Qwen3Config or Qwen3MoeConfig (model_type qwen3 or qwen3_moe) when hf_path is null."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Processes a dimension; data parallelism takes what is left of the world size."""

    tensor: int = 1
    """Processes that share every layer."""
    pipeline: int = 1
    """Processes that share the depth."""
    expert: int = 1
    """Processes that share the experts of a mixture-of-experts model."""

    def __post_init__(self) -> None:
        _at_least(1, tensor=self.tensor, pipeline=self.pipeline, expert=self.expert)


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    kind: Literal["arithmetic", "jsonl"] = "arithmetic"
    """arithmetic: embedded problems over a built-in tokenizer. jsonl: prompts of a file, tokenizer of model.hf_path."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task; docs/tasks.md lists them."""


@dataclass(frozen=True, kw_only=True)
class WarmupSettings:
    """Supervised steps on the task's demonstrations before reinforcement learning."""

    steps: int = 0
    """Optimizer steps at most; 0 starts with reinforcement learning."""
    batch_size: int = 256
    """Demonstrations a step."""
    lr: float = 1e-3
    """Learning rate of the warm-up."""
    target_accuracy: float | None = None
    """Stop early once held-out accuracy, measured every `check_interval` steps, reaches this share; null: never."""
    check_interval: int = 25
    """Steps between two such measurements."""

    def __post_init__(self) -> None:
        _at_least(0, steps=self.steps)
        _at_least(1, batch_size=self.batch_size, check_interval=self.check_interval)
        _positive(lr=self.lr)
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise ValueError(f"target_accuracy must be in (0, 1], got {self.target_accuracy!r}")


@dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """Servers that sample, and how they are fed and given weights."""

    urls: tuple[str, ...] = ("http://127.0.0.1:30000",)
    """Address of every server, or of one sglang-router."""
    concurrency: int = 256
    """Requests in flight from one trainer process."""
    timeout_s: float = 600.0
    """Longest wait for one answer."""
    retries: int = 3
    """New attempts of a request that failed, where a retry is safe."""
    backoff_s: float = 1.0
    """Mean wait before the first of them; it doubles with each."""
    partial: bool = True
    """Continue a response that was stopped before its end, instead of rejecting it."""
    weight_sync: Literal["disk", "tensor", "distributed"] = "disk"
    """disk: a checkpoint in `sync_dir`. tensor: in the body of requests. distributed: broadcast over NCCL or gloo."""
    sync_dir: str | None = None
    """Folder that trainer and servers see under one name, for disk; null: OUTPUT/sync."""
    bucket_bytes: int = 512 * 1024**2
    """Weights sent at a time, and the most memory a sync takes beside one tensor."""
    capture_routes: bool = False
    """Ask for the experts of every token; the servers need --enable-return-routed-experts."""
    max_staleness: int | None = None
    """Reject a response with a token of weights older than this many versions; null: none is."""
    max_rejected_share: float = 0.05
    """Stop when a larger share of a step's responses came back damaged."""
    dump_rejected: bool = False
    """Write them to OUTPUT/rejected."""

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("urls must name at least one server")
        _at_least(1, concurrency=self.concurrency, bucket_bytes=self.bucket_bytes)
        _at_least(0, retries=self.retries, max_rejected_share=self.max_rejected_share)
        _positive(timeout_s=self.timeout_s, backoff_s=self.backoff_s)
        if self.max_staleness is not None:
            _at_least(0, max_staleness=self.max_staleness)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    engine: Literal["hf", "sglang", "replay"] = "hf"
    """hf: the embedded transformers engine. sglang: servers, see `sglang`. replay: the samples recorded by --dump, from
    `replay_path`."""
    sglang: SGLangSettings = field(default_factory=SGLangSettings)
    replay_path: str | None = None
    """Dump folder of an earlier run, for engine replay."""
    prompts_per_step: int = 64
    """Prompts (groups) a rollout step."""
    samples_per_prompt: int = 8
    """Responses a prompt; their rewards make each other's baseline."""
    max_new_tokens: int = 16
    """Longest response, tokens."""
    temperature: float = 1.0
    """Divides the logits of both policies."""
    top_p: float = 1.0
    """Below 1 both policies are renormalised over the kept ids."""
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    dtype: Dtype = "bf16"
    """Precision of the embedded engine."""
    quantize: Literal["none", "int8", "fp8"] = "none"
    """Quantise and dequantise exported weights, so that any engine serves the quantised values."""
    amplify: float = 0.0
    """Standard deviation of noise added to exported weights, in units of each tensor's own standard deviation."""
    staleness: int = 0
    """Serve weights this many steps old."""
    max_nonfinite_share: float = 0.01
    """Stop when a larger share of the log-probs is NaN or infinite."""

    def __post_init__(self) -> None:
        _at_least(1, prompts_per_step=self.prompts_per_step, max_new_tokens=self.max_new_tokens)
        _at_least(2, samples_per_prompt=self.samples_per_prompt)
        _at_least(0, staleness=self.staleness, amplify=self.amplify, max_nonfinite_share=self.max_nonfinite_share)
        _positive(temperature=self.temperature)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 (off) or >= 1, got {self.top_k!r}")
        if self.engine == "replay" and not self.replay_path:
            raise ValueError("replay_path must name a recorded dump when engine is 'replay'")


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    advantage: Literal["rloo", "grpo"] = "rloo"
    """rloo: reward minus the mean of the other responses. grpo: reward minus the group mean, over its deviation."""
    surrogate: Literal["ppo", "reinforce"] = "ppo"
    """ppo: clipped ratio current/old. reinforce: log-prob times advantage."""
    clip_lower: float = 0.2
    """PPO ratio is clipped at 1 - clip_lower."""
    clip_upper: float = 0.28
    """PPO ratio is clipped at 1 + clip_upper."""
    dual_clip: float | None = None
    """Bound on the PPO loss of negative advantages, > 1; null: none."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How per-token losses become one number; seq-mean-token-sum-norm divides by rollout.max_new_tokens."""
    denominator: Literal["original", "kept"] = "original"
    """original: rejected tokens stay in the denominator. kept: they leave it, which rescales the step."""
    kl_coef: float = 0.0
    """Weight of the k3 penalty towards the weights that reinforcement learning started from."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        _at_least(0, clip_lower=self.clip_lower, clip_upper=self.clip_upper, kl_coef=self.kl_coef)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be > 1, got {self.dual_clip!r}")


@dataclass(frozen=True, kw_only=True)
class MoeSettings:
    """Routes of a mixture-of-experts model, in the trainer and in the sampler."""

    record: bool = False
    """Record the experts that the trainer's routers choose, and report how far they are from the sampler's."""
    replay: Literal["none", "R2", "R3"] = "none"
    """R2: the update passes use the experts that the trainer chose before the update. R3: every pass uses those of the
    sampler."""
    dump_routes: bool = False
    """With --dump also write the sampler's routes, 4 bytes x layers x experts a token before compression;
    rollout.engine 'replay' then returns them."""

    @property
    def active(self) -> bool:
        return self.record or self.replay != "none"

    @property
    def wants_routes(self) -> bool:
        """The sampler is to return its routes."""
        return self.record or self.replay == "R3" or self.dump_routes


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    steps: int = 100
    """Rollout steps of reinforcement learning."""
    seed: int = 1
    """Of weights, data and sampling."""
    dtype: Dtype = "fp32"
    """Precision of the trained model; log-probs, ratios and losses are fp32 whatever it is."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is fused when Apex or TransformerEngine is installed; sgd has no momentum."""
    lr: float = 1e-4
    """Learning rate after its warm-up."""
    min_lr: float = 0.0
    """Where lr_decay_style ends."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of Megatron's OptimizerParamScheduler over the optimizer steps of the job."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear learning-rate warm-up from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    mini_batches_per_rollout: int = 1
    """Optimizer steps a rollout, each on its own groups."""
    micro_batches: int | None = None
    """Micro-batches a mini-batch and data-parallel rank; null: as few as `max_tokens_per_microbatch` allows."""
    max_tokens_per_microbatch: int = 8192
    """Packed tokens a micro-batch; a longer sequence gets one of its own."""
    eval_interval: int = 10
    """Steps between two held-out evaluations, which ask the engine that serves the rollouts."""
    eval_samples: int = 1
    """Sampled answers a held-out prompt, at the rollout temperature."""
    save_interval: int = 50
    """Steps between two checkpoints; 0: none, and a job that is stopped starts anew."""
    keep_checkpoints: int = 2
    """Checkpoints kept; older ones are deleted."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """Of log-probs, correction and loss; auto: the Triton kernels on GPUs, plain PyTorch on CPU."""
    debug_checks: bool = False
    """Check token ids, kept ids and sequence offsets on the device, too, which waits for it."""
    save_hf: bool = True
    """At the end write the weights as a Hugging Face checkpoint to OUTPUT/hf."""

    def __post_init__(self) -> None:
        _positive(lr=self.lr, adam_eps=self.adam_eps)
        _at_least(0, steps=self.steps, min_lr=self.min_lr, lr_warmup_steps=self.lr_warmup_steps,
                  weight_decay=self.weight_decay, clip_grad=self.clip_grad,
                  save_interval=self.save_interval)  # fmt: skip
        _at_least(1, mini_batches_per_rollout=self.mini_batches_per_rollout, eval_samples=self.eval_samples,
                  max_tokens_per_microbatch=self.max_tokens_per_microbatch, eval_interval=self.eval_interval,
                  keep_checkpoints=self.keep_checkpoints)  # fmt: skip
        if self.micro_batches is not None:
            _at_least(1, micro_batches=self.micro_batches)
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must be <= lr, got min_lr={self.min_lr!r} lr={self.lr!r}")


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    name: str = "run"
    """Title of the display and the report."""
    output: str = "runs/run"
    """Directory of metrics.jsonl, checkpoints, dumps, TensorBoard files and report.html."""
    model: ModelSettings = field(default_factory=ModelSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    moe: MoeSettings = field(default_factory=MoeSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    lr_decay: LengthDecaySettings | None = None
    """Length-decay learning rate on top of train.lr and its schedule; `{}` switches it on with its defaults."""


def load(path_or_text: str | Path, assignments: Iterable[str] = ()) -> JobSettings:
    """The settings of a YAML file or text, with ``key=value`` assignments on top.

    Raises:
        ValueError: one sentence naming the field or the file.
    """
    return schema.from_dict(JobSettings, schema.load_yaml(path_or_text), assignments=assignments)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value!r}")


def _at_least(bound: float, **values: float) -> None:
    for name, value in values.items():
        if not value >= bound:
            raise ValueError(f"{name} must be >= {bound}, got {value!r}")
