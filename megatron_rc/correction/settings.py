"""RolloutCorrection: the importance weight, the rejections and the old policy; its presets and YAML."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_rc import schema
from megatron_rc.correction.presets import METHODS, Method
from megatron_rc.correction.rejection import STANDARDIZED as STANDARDIZED
from megatron_rc.correction.rejection import STATISTICS as STATISTICS
from megatron_rc.correction.rejection import Rejection as Rejection
from megatron_rc.correction.weight import MODES
from megatron_rc.correction.weight import Unit as Unit
from megatron_rc.correction.weight import Weight as Weight
from megatron_rc.schema.limits import check_one_of, check_positive

Normalize = Literal["none", "batch"]
Old = Literal["recompute", "current", "rollout"]
Centering = Literal["none", "top", "support"]
Surrogate = Literal["ppo", "cispo", "reinforce"]
"""Names of the surrogates of the loss, which `loss.options` describes."""


@dataclass(frozen=True)
class RolloutCorrection:
    """The correction of a batch sampled from mu to train pi. Every bound is a bound on pi / mu, and inclusive."""

    weight: Weight | None = None
    """None: no importance weight (every weight is 1 where the mask is 1)."""
    reject: tuple[Rejection, ...] = ()
    """Gates; a token counts only if all of them keep it."""
    normalize: Normalize = "none"
    """batch: divide the weights by their mean over the kept tokens of the whole rollout batch, pooled over DP x CP. It
    comes after the bounds, so that a weight may exceed upper (weight_max is the largest), and after the clamp to
    log_ratio_bound, so that all units below -log_ratio_bound get equal weights."""
    old: Old = "recompute"
    """recompute: three policies, pi_old from a forward pass before the update. current: pi_old = pi.detach(), for one
    optimizer step per rollout. rollout: two policies, the surrogate's ratio is pi / mu itself, for engines that agree
    up to rounding: its clip pulls pi towards mu."""
    centering: Centering = "none"
    """top: score centering. The mean score under mu, weighted like the drawn token's, is subtracted, so that no drift
    towards mu is left. It is computed from mu's most probable ids (`rollout.top_logprobs`) and current pi. support:
    the same under top-p or top-k, where mu and pi are distributions over the kept ids; exact where all are listed."""
    log_ratio_bound: float = 20.0
    """Weights and metrics clamp log-ratios to +- this before exp; gates compare unclamped logs."""
    max_k3: float | None = None
    """Largest k3 between trainer and sampler, pooled over the batch, with which a job goes on; above it the job stops
    before the optimizer step. Without it, a k3 above 0.1 is warned of once."""
    surrogate: Surrogate | None = None
    """The surrogate that the loss must have for this method; null: any. A job whose settings name none takes it."""

    def __post_init__(self) -> None:
        if self.weight is not None and not isinstance(self.weight, Weight):
            raise ValueError(f"weight must be a Weight or None, got {self.weight!r}")
        if not isinstance(self.reject, tuple) or not all(isinstance(gate, Rejection) for gate in self.reject):
            raise ValueError(f"reject must be a tuple of Rejection, got {self.reject!r}")
        if sum(gate.statistic == STANDARDIZED for gate in self.reject) > 1:
            raise ValueError("reject must hold at most one rejection on 'standardized'")
        check_one_of("normalize", self.normalize, Normalize)
        check_one_of("old", self.old, Old)
        check_one_of("centering", self.centering, Centering)
        if self.surrogate is not None:
            check_one_of("surrogate", self.surrogate, Surrogate)
        # exp(40) squared is still finite in fp32
        if isinstance(self.log_ratio_bound, bool) or not 0 < self.log_ratio_bound <= 40:
            raise ValueError(f"log_ratio_bound must be in (0, 40], got {self.log_ratio_bound!r}")
        if self.weight is not None:
            self.weight.check_log_ratio_bound(self.log_ratio_bound)
        if self.max_k3 is not None:
            check_positive(max_k3=self.max_k3)
        if self.centering != "none":
            self._check_centering()
        if self.normalize == "batch" and self.old != "recompute":
            raise ValueError(
                f"normalize must be 'none' when old is {self.old!r}: its weights are computed one micro-batch at a "
                "time, and a mean over less than the batch would depend on how the batch was cut"
            )

    def _check_centering(self) -> None:
        """Refuse what a token that was not drawn has no value of: the mean over all tokens needs it."""
        weight, where = self.weight, f"when centering is {self.centering!r}"
        if self.old != "current":
            raise ValueError(
                f"old must be 'current' {where}, got {self.old!r}: the weights of the drawn token and of the top ids "
                "must be those of the policy that is trained"
            )
        if self.surrogate not in (None, "ppo", "reinforce"):
            raise ValueError(f"surrogate must be null, 'ppo' or 'reinforce' {where}, got {self.surrogate!r}")
        if weight is not None and weight.level != "token":
            raise ValueError(f"weight.level must be 'token' {where}, got {weight.level!r}")
        if weight and (weight.reads_lags or weight.staleness_upper is not None or weight.upper == "measured"):
            raise ValueError(f"weight must depend on pi / mu alone {where}: no lags, staleness or measured upper")
        for gate in self.reject:
            of_token = gate.level == "token" and gate.when == "always" and gate.statistic in STATISTICS
            if not of_token or gate.statistic == STANDARDIZED:
                raise ValueError(f"reject must not hold {gate.name!r} {where}: a gate must judge a token's pi and mu")

    def centred(self, centering: Centering) -> "RolloutCorrection | None":
        """The same weight and gates with score centering; None if they judge more than a token's pi and mu."""
        try:
            return replace(self, centering=centering, old="current", normalize="none", surrogate=None)
        except ValueError:
            return None

    @property
    def acts(self) -> bool:
        """Whether it changes a loss, rather than only measuring."""
        return self.weight is not None or bool(self.reject) or self.centering != "none"

    @property
    def drops(self) -> bool:
        """Whether it drops tokens."""
        return bool(self.reject) or (self.weight is not None and MODES[self.weight.mode].drops)

    def judges(self, statistic: str) -> bool:
        """Whether a rejection is on this statistic."""
        return any(gate.statistic == statistic for gate in self.reject)

    def check_one_micro_batch(self, caller: str) -> None:
        """Refuse "standardized" and a measured upper, for a ``caller`` that sees one micro-batch at a time."""
        self.check_keeps_upper(caller)
        if self.judges(STANDARDIZED):
            raise ValueError(
                f"reject must not use 'standardized' in {caller}, which sees one micro-batch at a time and has no "
                "mean_k3 of earlier batches"
            )

    def check_keeps_upper(self, caller: str) -> None:
        """Refuse a measured upper, for a ``caller`` that keeps none from one rollout to the next."""
        if self.weight is not None and self.weight.upper == "measured":
            raise ValueError(f"upper must be a number in {caller}, which keeps no bound that earlier rollouts measured")

    def check_surrogate_of(self, caller: str) -> None:
        """Refuse centering and another surrogate than that of PPO, for a ``caller`` with a loss of its own."""
        if self.centering != "none":
            raise ValueError(f"centering must be 'none' in {caller}, which gets no top log-probs from its sampler")
        if self.surrogate not in (None, "ppo"):
            raise ValueError(f"surrogate must be null or 'ppo' in {caller}, which has its own, got {self.surrogate!r}")

    def check_without_versions(self, caller: str) -> None:
        """Refuse what reads lags, and staleness_upper, for a ``caller`` that knows no version of the sampler."""
        self.check_without_sampling_logprobs(caller)
        names = ["lag"] * self.judges("lag")
        if self.weight is not None:
            names += ["growth"] * (self.weight.growth == "sqrt_lag") + ["upper_by_lag"] * bool(self.weight.upper_by_lag)
        if names:
            raise ValueError(f"{names[0]} must not be used in {caller}, which knows no version of the sampler")

    def check_without_sampling_logprobs(self, caller: str) -> None:
        """Refuse staleness_upper, for a ``caller`` that has no log-probs by the version that sampled."""
        if self.weight is not None and self.weight.staleness_upper is not None:
            why = "which has no log-probs by the weights that sampled"
            raise ValueError(f"staleness_upper must not be used in {caller}, {why}")

    @classmethod
    def of(cls, given: "RolloutCorrection | str") -> "RolloutCorrection":
        """The correction itself, or the preset of that name; ValueError for anything else."""
        if isinstance(given, str):
            return cls.preset(given)
        if isinstance(given, cls):
            return given
        must = "correction must be a RolloutCorrection or the name of a preset, such as 'token-tis' or 'none'"
        raise ValueError(f"{must}, got {type(given).__name__}; RolloutCorrection.from_dict takes a mapping")

    @classmethod
    def preset(cls, name: str) -> "RolloutCorrection":
        """A named method with its published or customary bounds; `megatron-rc presets` prints all, with sources.

        Raises:
            ValueError: there is no preset of that name; the error suggests the nearest name.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}{schema.nearest(name, PRESETS)}")
        return PRESETS[name].correction

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Turn a preset name, or a mapping with the key `preset`, into the plain mapping of all fields.

        Other keys of the mapping override the preset: `weight` field by field, `reject` as a whole. Anything else is
        returned as it is, so a configuration loader may call this on any value of `correction`.

        Raises:
            ValueError: there is no preset of that name.
        """
        if isinstance(value, str):
            return cls.preset(value).to_dict()
        if not isinstance(value, dict) or "preset" not in value:
            return value
        fields = cls.preset(value["preset"]).to_dict()
        for key, override in value.items():
            if key == "weight" and isinstance(override, dict) and fields["weight"] is not None:
                fields["weight"] = {**fields["weight"], **override}
            elif key != "preset":
                fields[key] = override
        return fields

    @classmethod
    def from_dict(cls, data: Any) -> "RolloutCorrection":
        """From nested mappings, a mapping with `preset` and overrides, or a preset name.

        Raises:
            ValueError: one sentence with the field, its value and what was expected.
        """
        return schema.from_dict(cls, data)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain mappings, which `from_dict` reads back."""
        return schema.to_dict(self)

    @classmethod
    def from_yaml(cls, path_or_text: str | Path) -> "RolloutCorrection":
        """From a YAML file, YAML text, or a preset name.

        Raises:
            ValueError: no such file or preset, no YAML, or a wrong field, which the error names.
        """
        if str(path_or_text).strip() in PRESETS:
            return cls.preset(str(path_or_text).strip())
        return cls.from_dict(schema.load_yaml(path_or_text))

    def to_yaml(self) -> str:
        """YAML text, which `from_yaml` reads back."""
        return schema.dump_yaml(self.to_dict())


class Preset(NamedTuple):
    correction: RolloutCorrection
    source: str
    """The origin of the form and of the bounds."""
    loss: dict[str, Any]
    """Options of the loss that belong to the method."""


def _preset(method: Method) -> Preset:
    correction = RolloutCorrection(**method.fields)
    surrogate = {} if correction.surrogate is None else {"surrogate": correction.surrogate}
    return Preset(correction, method.source, {**surrogate, **method.loss})


PRESETS = {name: _preset(method) for name, method in METHODS.items()}
"""Every method of `correction.presets`."""
