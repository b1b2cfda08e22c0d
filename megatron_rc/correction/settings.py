"""RolloutCorrection: the importance weight, the rejections and the old policy; presets and YAML."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_rc import schema
from megatron_rc.correction.weight import Weight as Weight
from megatron_rc.correction.weight import check_ordered_bounds, check_positive_bounds
from megatron_rc.schema.limits import check_one_of, check_positive

Unit = Literal["token", "sequence", "segment"]
Reduce = Literal["sum", "mean", "max", "min"]
When = Literal["always", "negative_advantage"]
Normalize = Literal["none", "batch"]
Old = Literal["recompute", "current", "rollout"]

STATISTICS = ("ratio", "k2", "k3", "abs_log_ratio", "prob_diff", "standardized")
"""Statistics that `correct` computes itself; any other name but "lag" must be passed to it in `statistics`."""
STANDARDIZED = "standardized"
"""The statistic that needs a number of the whole batch before any gate: its mean k3."""


@dataclass(frozen=True)
class Rejection:
    """A gate: units whose statistic is outside [lower, upper] are dropped from the policy-gradient term."""

    statistic: str = "ratio"
    """ratio (pi / mu), k2 (l^2 / 2), k3 (e^l - 1 - l), abs_log_ratio (|l|), prob_diff (pi - mu, signed), with
    l = log pi - log mu. standardized: |sum l + T K| / sqrt(2 T K) of a unit of T tokens, K the mean k3 of the batch,
    with an upper bound only. lag: updates since the token was sampled. Or a name given to `correct` in `statistics`.
    """
    level: Unit = "sequence"
    """The unit that is judged and dropped: a token, a sequence, or a segment (one turn)."""
    reduce: Reduce = "sum"
    """How values of tokens become that of the unit; in log space for ratio (sum: product of ratios, mean: geometric
    mean)."""
    lower: float | None = None
    """Smallest value that is kept, inclusive."""
    upper: float | None = None
    """Largest value that is kept, inclusive."""
    when: When = "always"
    """negative_advantage: only units with a negative mean advantage can be dropped."""

    def __post_init__(self) -> None:
        if not isinstance(self.statistic, str) or not self.statistic:
            raise ValueError(f"statistic must be a name, got {self.statistic!r}")
        check_one_of("level", self.level, Unit)
        check_one_of("reduce", self.reduce, Reduce)
        check_one_of("when", self.when, When)
        if self.lower is None and self.upper is None:
            raise ValueError(f"lower or upper must be set for the rejection on {self.statistic!r}")
        if self.statistic == "ratio":
            check_positive_bounds(self.lower, self.upper)
        if self.statistic == STANDARDIZED:
            self._check_standardized()
        check_ordered_bounds(self.lower, self.upper)
        if self.statistic in ("k2", "k3", "abs_log_ratio") and self.upper is not None and not self.upper >= 0:
            raise ValueError(f"upper must be >= 0 for {self.statistic!r}, got upper={self.upper!r}")

    @property
    def name(self) -> str:
        """The name of this gate in metrics, such as 'ratio_sequence_mean' or 'k2_token_negative_advantage'."""
        parts = [self.statistic, self.level]
        if self.level != "token" and self.statistic != STANDARDIZED:
            parts.append(self.reduce)
        if self.when != "always":
            parts.append(self.when)
        return "_".join(parts)

    def _check_standardized(self) -> None:
        if self.level == "token":
            raise ValueError("level must be 'sequence' or 'segment' for 'standardized', got 'token': use k2 for tokens")
        if self.reduce != "sum":
            raise ValueError(f"reduce must be 'sum' for 'standardized', which is made of sums, got {self.reduce!r}")
        if self.lower is not None:
            raise ValueError(f"lower must be None for 'standardized', a distance from the mean, got {self.lower!r}")
        if self.upper is None or not self.upper > 0:
            raise ValueError(f"upper must be > 0 for 'standardized', in standard deviations, got {self.upper!r}")


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
    up to rounding: its clip pulls pi towards mu (docs/methods.md, Two policies)."""
    log_ratio_bound: float = 20.0
    """Weights and metrics clamp log-ratios to +- this before exp; gates compare unclamped logs."""
    max_k3: float | None = None
    """Largest k3 between trainer and sampler, pooled over the batch, with which a job goes on; above it the job stops
    before the optimizer step. Without it, a k3 above 0.1 is warned of once."""

    def __post_init__(self) -> None:
        if self.weight is not None and not isinstance(self.weight, Weight):
            raise ValueError(f"weight must be a Weight or None, got {self.weight!r}")
        if not isinstance(self.reject, tuple) or not all(isinstance(gate, Rejection) for gate in self.reject):
            raise ValueError(f"reject must be a tuple of Rejection, got {self.reject!r}")
        if sum(gate.statistic == STANDARDIZED for gate in self.reject) > 1:
            raise ValueError("reject must hold at most one rejection on 'standardized'")
        check_one_of("normalize", self.normalize, Normalize)
        check_one_of("old", self.old, Old)
        # exp(40) squared is still finite in fp32
        if isinstance(self.log_ratio_bound, bool) or not 0 < self.log_ratio_bound <= 40:
            raise ValueError(f"log_ratio_bound must be in (0, 40], got {self.log_ratio_bound!r}")
        if self.weight is not None:
            self.weight.check_log_ratio_bound(self.log_ratio_bound)
        if self.max_k3 is not None:
            check_positive(max_k3=self.max_k3)
        if self.normalize == "batch" and self.old != "recompute":
            raise ValueError(
                f"normalize must be 'none' when old is {self.old!r}: its weights are computed one micro-batch at a "
                "time, and a mean over less than the batch would depend on how the batch was cut"
            )

    def check_one_micro_batch(self, caller: str) -> None:
        """Refuse "standardized" and a measured upper, for a ``caller`` that sees one micro-batch at a time."""
        self.check_keeps_upper(caller)
        if any(gate.statistic == STANDARDIZED for gate in self.reject):
            raise ValueError(
                f"reject must not use 'standardized' in {caller}, which sees one micro-batch at a time and has no "
                "mean_k3 of earlier batches"
            )

    def check_keeps_upper(self, caller: str) -> None:
        """Refuse a measured upper, for a ``caller`` that keeps none from one rollout to the next."""
        if self.weight is not None and self.weight.upper == "measured":
            raise ValueError(f"upper must be a number in {caller}, which keeps no bound that earlier rollouts measured")

    def check_without_versions(self, caller: str) -> None:
        """Refuse what reads lags, and staleness_upper, for a ``caller`` that knows no version of the sampler."""
        self.check_without_sampling_logprobs(caller)
        names = ["lag" for gate in self.reject if gate.statistic == "lag"]
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
    def preset(cls, name: str) -> "RolloutCorrection":
        """A named method with its published or customary bounds; `PRESETS` lists all of them with their sources.

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


def _geometric_gate(lower: float, upper: float) -> Rejection:
    return Rejection("ratio", "sequence", "mean", lower=lower, upper=upper)


_TOKEN_TIS = Weight("token", "truncate", upper=2.0)

PRESETS: dict[str, Preset] = {
    "none": Preset(RolloutCorrection(), "no correction; metrics only"),
    "token-tis": Preset(
        RolloutCorrection(_TOKEN_TIS), "Yao et al., Off-policy RL (fengyao.notion.site/off-policy-rl); C = 2 customary"
    ),
    "token-mis": Preset(
        RolloutCorrection(Weight("token", "mask", upper=2.0)),
        "one-sided masked IS, Beyond Precision (arXiv 2602.01826), C = 2",
    ),
    "icepop": Preset(
        RolloutCorrection(Weight("token", "mask", 0.5, 5.0)),
        "Ring-1T (arXiv 2510.18855); 0.5 / 5.0 as in verl, NeMo-RL",
    ),
    "seq-tis": Preset(
        RolloutCorrection(Weight("sequence", "truncate", upper=2.0)),
        "rl-collapse part 2; C = 2 as in verl; the metric suggested_seq_cap gives sqrt(2 (1 + chi2_seq))",
    ),
    "seq-mis": Preset(
        RolloutCorrection(Weight("sequence", "mask", upper=2.0)),
        "rl-collapse part 3, one-sided; C = 2 as in Beyond Precision (arXiv 2602.01826)",
    ),
    "geo-mask": Preset(
        RolloutCorrection(reject=(_geometric_gate(0.999, 1.001),)),
        "rl-collapse part 3; 0.999 / 1.001 as in verl geo_rs; drops most responses of a few tokens (docs/moe.md)",
    ),
    "geo-mask-token-tis": Preset(
        RolloutCorrection(_TOKEN_TIS, (_geometric_gate(0.999, 1.001),)), "rl-collapse part 3; bounds as in verl, C = 2"
    ),
    "seq-mask-tis": Preset(
        RolloutCorrection(_TOKEN_TIS, (_geometric_gate(0.999, 1.002),)),
        "NeMo-RL, ProRL v2: 0.999 / 1.002; its untruncated token weights are truncated at 2 here",
    ),
    "veto": Preset(
        RolloutCorrection(reject=(Rejection("ratio", "sequence", "min", lower=1e-4),)),
        "slime rs_veto_threshold 1e-4: one impossible token drops the sequence",
    ),
    "k3-reject": Preset(
        RolloutCorrection(reject=(Rejection("k3", "sequence", "mean", upper=0.01),)), "verl k3_rs 0.01 (0.001-0.01)"
    ),
    "trust-region-mask": Preset(
        RolloutCorrection(reject=(Rejection("k2", "sequence", "max", upper=2.0),)),
        "Trust Region Masking (arXiv 2512.23075), max gate with the sample proxy k2; 2.0 (|l| <= 2) from verl's 1.5-3",
    ),
    "standardized": Preset(
        RolloutCorrection(_TOKEN_TIS, (Rejection("standardized", "sequence", upper=2.0),)),
        "experimental: an outlier filter that keeps about 95 % of honest sequences at every length; derived, its bound "
        "as customary; the table below says what it costs",
    ),
    "prefix-tis": Preset(
        RolloutCorrection(Weight("prefix", "truncate", upper=2.0)),
        "experimental: prefix ratios of CTPO (arXiv 2605.07331), with C = 2 of token-tis for its bounds that grow",
    ),
    "off-policy-sequence-mask": Preset(
        RolloutCorrection(
            reject=(Rejection("ratio", "sequence", "mean", lower=math.exp(-0.5), when="negative_advantage"),),
            old="rollout",
        ),
        "DeepSeek-V3.2 eq. 9 on current / mu; lower = exp(-delta), delta unpublished: 0.5 as TRL suggests (slime 1e-4)",
    ),
}
"""Every preset with the source of its form and bounds."""
