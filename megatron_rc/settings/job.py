"""Every setting of a training job, with its default; the YAML of `megatron-rc train` has these fields.

To add a setting, add a field with a docstring and, where it has limits, a check in ``__post_init__``;
`megatron-rc settings > docs/settings.md` documents it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_rc import schema
from megatron_rc.correction.settings import Aggregation, Denominator, RolloutCorrection, Surrogate, check_clipping
from megatron_rc.engine import HiddenSampling, SamplingParams
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.learning_rate.mismatch import HasLRRule, LRGateSettings, check_lr_rules
from megatron_rc.loss.advantages import ADVANTAGES
from megatron_rc.report.sinks import LogSettings
from megatron_rc.schema.limits import check_at_least, check_positive
from megatron_rc.settings.cluster import ClusterSettings
from megatron_rc.settings.dump import DumpSettings
from megatron_rc.settings.head import Head, HeadOptions, WiderDtype
from megatron_rc.settings.sglang import SGLangSettings
from megatron_rc.tasks.registry import TaskKind

Dtype = Literal["fp32", "bf16", "fp16"]
Quantize = Literal["none", "int8", "fp8"]
Control = Literal["none", "random-mask", "shuffled-weights", "mean-weight"]
# a type checker knows no Literal that is computed
if TYPE_CHECKING:
    Advantage = str
else:
    Advantage = Literal[tuple(ADVANTAGES)]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    hf_path: str | None = None
    """Folder with config.json and safetensors to start from; null builds `config` with random weights."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of a Hugging Face config.json, with model_type qwen2, qwen3 or qwen3_moe; used when hf_path is null."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Ranks per parallel dimension; the rest of the world size is data parallel."""

    tensor: int = 1
    """Ranks that share every layer."""
    pipeline: int = 1
    """Ranks that share the layers, each with consecutive ones."""
    expert: int = 1
    """Ranks that share the experts of a mixture-of-experts model."""

    def __post_init__(self) -> None:
        check_at_least(1, tensor=self.tensor, pipeline=self.pipeline, expert=self.expert)


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    kind: TaskKind = "arithmetic"
    """Generated problems with a built-in tokenizer: arithmetic; copy, with long responses; calculator, with several
    turns per response. jsonl: prompts from a file, with the tokenizer of model.hf_path."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task; docs/tasks.md lists them."""


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
class RolloutSettings:
    engine: Literal["hf", "sglang", "replay"] = "hf"
    """hf: the embedded transformers engine. sglang: the servers of `sglang`. replay: the samples that --dump recorded
    in `replay_path`."""
    sglang: SGLangSettings = field(default_factory=SGLangSettings)
    replay_path: str | None = None
    """Dump folder of an earlier run, for engine replay."""
    prompts_per_step: int = 64
    """Prompts (= groups) per rollout step."""
    samples_per_prompt: int = 8
    """Responses per prompt; their rewards are the baseline of one another."""
    max_new_tokens: int = 16
    """Most tokens of a response, in all its turns, with the tokens of the environment between them."""
    temperature: float = 1.0
    """Divides the logits of both policies."""
    top_p: float = 1.0
    """Below 1 both policies are renormalised over the kept ids."""
    top_k: int = -1
    """Ids kept per token; -1 keeps the whole vocabulary."""
    dtype: Dtype = "bf16"
    """Precision of the embedded engine."""
    quantize: Quantize = "none"
    """Quantise and dequantise exported weights, so that any engine serves the quantised values."""
    amplify: float = 0.0
    """Standard deviation of noise added to exported weights, in units of each tensor's own standard deviation."""
    amplify_fixed: bool = False
    """Add the same noise at every sync, one draw per train.seed; otherwise every sync draws its own."""
    hidden: HiddenSampling = field(default_factory=HiddenSampling)
    staleness: int = 0
    """The engine serves weights that are this many steps old."""
    max_nonfinite_share: float = 0.01
    """The job stops when a larger share of the log-probs is NaN or infinite."""

    def __post_init__(self) -> None:
        self.sampling()
        check_at_least(1, prompts_per_step=self.prompts_per_step)
        check_at_least(2, samples_per_prompt=self.samples_per_prompt)
        check_at_least(0, staleness=self.staleness, amplify=self.amplify, max_nonfinite_share=self.max_nonfinite_share)
        if self.engine == "replay" and not self.replay_path:
            raise ValueError("replay_path must name a recorded dump when engine is 'replay'")
        if self.hidden.active and self.engine != "hf":
            why = "only the embedded engine can draw tokens otherwise than it reports"
            raise ValueError(f"hidden must keep its defaults when engine is {self.engine!r}: {why}")
        if self.amplify_fixed and (self.amplify == 0 or self.engine == "replay"):
            raise ValueError("amplify_fixed must be false where no weights are served, or amplify is 0")

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        return SamplingParams(self.max_new_tokens, self.temperature, self.top_p, self.top_k, stop_token_ids)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    advantage: Advantage = "rloo"
    """Estimator of advantages from rewards; `megatron_rc/loss/advantages.py` explains each as `NAME_advantages`."""
    surrogate: Surrogate = "ppo"
    """ppo: clipped ratio current/old. reinforce: log-prob times advantage."""
    clip_lower: float = 0.2
    """The PPO ratio is clipped at 1 - clip_lower."""
    clip_upper: float = 0.28
    """The PPO ratio is clipped at 1 + clip_upper."""
    dual_clip: float | None = None
    """Bound on the PPO ratio where the advantage is negative, > 1; null sets none."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number; seq-mean-token-sum-norm divides by rollout.max_new_tokens."""
    denominator: Denominator = "original"
    """original: rejected tokens stay in the denominator. kept: they leave it, which makes the step larger when more is
    rejected."""
    kl_coef: float = 0.0
    """Weight of the k3 penalty towards the weights that reinforcement learning started from."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        check_clipping(self.clip_lower, self.clip_upper, self.dual_clip)
        check_at_least(0, kl_coef=self.kl_coef)


@dataclass(frozen=True, kw_only=True)
class MoeSettings:
    """Routes of a mixture-of-experts model, in the trainer and in the sampler."""

    record: bool = False
    """Record the experts that the trainer's routers choose, and report how far they are from the sampler's."""
    replay: Literal["none", "R2", "R3"] = "none"
    """R2: the update passes use the experts that the trainer chose before the update. R3: every pass uses the experts
    of the sampler."""
    dump_routes: bool = False
    """With --dump or dump.tokens also write the sampler's routes, 4 bytes x layers x experts per token before
    compression; rollout.engine replay then returns them."""

    @property
    def active(self) -> bool:
        return self.record or self.replay != "none"

    @property
    def wants_routes(self) -> bool:
        """Whether the sampler must return its routes."""
        return self.record or self.replay == "R3" or self.dump_routes


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
    """Split the gap between trainer and sampler into mismatch and staleness: with rollout.staleness N or asynchronous
    N, N + 1 copies of the trained weights are kept in host memory, N are written with every checkpoint, and each older
    version in a rollout takes one more forward pass. A weight with staleness_upper keeps them in any case."""
    control: Control = "none"
    """Lays what the correction does on other tokens, to see whether its choice matters. random-mask: as many are
    dropped, at random, and the others have weight 1. shuffled-weights: weights and drops change places at random.
    mean-weight: all are kept, with the mean weight of the batch. Turns or sequences take the place of tokens where the
    correction judges those as a whole."""
    mini_batches_per_rollout: int = 1
    """Optimizer steps per rollout step, each on its own groups."""
    micro_batches: int | None = None
    """Micro-batches per mini-batch and data-parallel rank; null takes as few as `max_tokens_per_microbatch` allows."""
    max_tokens_per_microbatch: int = 8192
    """Packed tokens per micro-batch; a longer sequence gets a micro-batch of its own."""
    eval_interval: int = 10
    """Steps between two held-out evaluations, whose answers come from the engine of the rollouts."""
    eval_weights: Literal["served", "trained"] = "served"
    """Weights that answer the held-out prompts. served: those of the rollouts, with their staleness and noise. trained:
    those of the trainer, served by the embedded engine for the time of the evaluation, without `rollout.hidden`."""
    eval_samples: int = 1
    """Answers sampled per held-out prompt, at the rollout temperature."""
    save_interval: int = 50
    """Steps between two checkpoints; 0 saves none, and a job that is stopped starts over."""
    keep_checkpoints: int = 2
    """Checkpoints to keep; older ones are deleted."""
    head: Head = "logits"
    """What log-probs are made of. logits: the model's logits of all tokens of a micro-batch. linear: its hidden states
    and the weight of its head, a few thousand tokens with a loss at a time, so that no tensor has as many elements as
    tokens times vocabulary; without an old pass (correction.old) backward computes these logits again."""
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
        if self.micro_batches is not None:
            check_at_least(1, micro_batches=self.micro_batches)
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must be <= lr, got min_lr={self.min_lr!r} lr={self.lr!r}")

    def head_options(self) -> HeadOptions:
        return HeadOptions(self.head, self.head_chunk, self.head_logits_dtype)


@dataclass(frozen=True, kw_only=True)
class JobSettings(HasLRRule):
    name: str = "run"
    """Title of the display and the report."""
    output: str = "runs/run"
    """Folder of metrics.jsonl, checkpoints, dumps, TensorBoard files and report.html."""
    model: ModelSettings = field(default_factory=ModelSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    moe: MoeSettings = field(default_factory=MoeSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    lr_decay: LengthDecaySettings | None = None
    """Length-decay learning rate on top of train.lr and its schedule; `{}` takes all its defaults, null has none."""
    lr_gate: LRGateSettings | None = None
    """Learning rate by mismatch, instead of lr_decay; `{}` takes all its defaults, null has none."""
    log: LogSettings = field(default_factory=LogSettings)
    dump: DumpSettings = field(default_factory=DumpSettings)

    def __post_init__(self) -> None:
        check_lr_rules(self.lr_decay, self.lr_gate, self.correction)
        if self.train.eval_weights == "trained" and self.rollout.engine != "hf":
            raise ValueError(f"train.eval_weights must be 'served' when rollout.engine is {self.rollout.engine!r}")

    @property
    def fresh(self) -> bool:
        """Whether every rollout is sampled with the weights that it trains."""
        return self.rollout.staleness == 0 and self.train.asynchronous == 0


def load(path_or_text: str | Path, assignments: Iterable[str] = ()) -> JobSettings:
    """The settings of a YAML file or text, with ``key=value`` assignments on top.

    Raises:
        ValueError: one sentence naming the field or the file.
    """
    return schema.from_dict(JobSettings, schema.load_yaml(path_or_text), assignments=assignments)
