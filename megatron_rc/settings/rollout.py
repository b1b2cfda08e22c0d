"""What is sampled, by which engine, and how far the weights that it serves are from those of the trainer."""

from dataclasses import dataclass, field
from typing import Annotated

from megatron_rc.engine import DEFAULT_ENGINE, ENGINES, EngineKind, HiddenSampling, SamplingParams
from megatron_rc.schema.choice import Choice
from megatron_rc.schema.limits import check_at_least
from megatron_rc.settings.model import Dtype
from megatron_rc.settings.quantization import QUANTIZATIONS, Quantize
from megatron_rc.settings.sglang import SGLangSettings


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    engine: Annotated[str, Choice(ENGINES)] = DEFAULT_ENGINE
    """What samples."""
    sglang: SGLangSettings = field(default_factory=SGLangSettings)
    recorded_path: str | None = None
    """Dump folder of an earlier run, for engine recorded."""
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
    top_logprobs: int = 0
    """Most probable ids per token whose log-probs the sampler returns, for `correction.centering`; 0 for none. They go
    into dumps, too, at 8 bytes each."""
    dtype: Dtype = "bf16"
    """Precision of the embedded engine."""
    quantize: Quantize = "none"
    """Quantise and dequantise what the sampler computes with: weights for any engine, the rest for the embedded one."""
    amplify: float = 0.0
    """Standard deviation of noise added to exported weights, in units of each tensor's own standard deviation."""
    amplify_fixed: bool = False
    """Add the same noise at every sync; otherwise every sync draws its own."""
    amplify_seed: int | None = None
    """The draw of that noise; null takes train.seed."""
    hidden: HiddenSampling = field(default_factory=HiddenSampling)
    lag: int = 0
    """The engine serves weights that are this many steps old."""
    max_nonfinite_share: float = 0.01
    """The job stops when a larger share of the log-probs is NaN, infinite or above 0."""

    def __post_init__(self) -> None:
        self.sampling()
        check_at_least(1, prompts_per_step=self.prompts_per_step)
        check_at_least(2, samples_per_prompt=self.samples_per_prompt)
        check_at_least(0, lag=self.lag, amplify=self.amplify, max_nonfinite_share=self.max_nonfinite_share)
        if self.kind.replays and not self.recorded_path:
            raise ValueError(f"recorded_path must name a recorded dump when engine is {self.engine!r}")
        if self.hidden.active and not self.kind.draws_otherwise:
            able = " or ".join(name for name, kind in ENGINES.items() if kind.draws_otherwise)
            why = f"only {able} can draw tokens otherwise than it reports"
            raise ValueError(f"hidden must keep its defaults when engine is {self.engine!r}: {why}")
        if self.quantize != "none" and QUANTIZATIONS[self.quantize].rounds_inputs and not self.kind.rounds_inputs:
            why = f"it rounds more than weights, which engine {self.engine!r} cannot do for us"
            raise ValueError(f"quantize must not be {self.quantize!r}: {why}; servers have flags of their own")
        if self.amplify_fixed and (self.amplify == 0 or self.kind.replays):
            raise ValueError("amplify_fixed must be false where no weights are served, or amplify is 0")
        if self.amplify_seed is not None and not self.amplify_fixed:
            raise ValueError("amplify_seed must be null without amplify_fixed: every sync draws its own noise")

    @property
    def kind(self) -> EngineKind:
        """What the engine can do."""
        return ENGINES[self.engine]

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        common = (self.max_new_tokens, self.temperature, self.top_p, self.top_k, stop_token_ids)
        return SamplingParams(*common, top_logprobs=self.top_logprobs)
