"""METHODS: named corrections, one row each, with the source of the form and of the bounds."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_rc.correction.rejection import Rejection
from megatron_rc.correction.weight import Weight


class Method(NamedTuple):
    fields: dict[str, Any]
    """Those of a RolloutCorrection that are not at their default."""
    source: str
    """The origin of the form and of the bounds."""
    loss: Mapping[str, Any] = MappingProxyType({})
    """Bounds of the surrogate that the method names."""


def _geometric_gate(lower: float, upper: float) -> Rejection:
    return Rejection("ratio", "sequence", "mean", lower=lower, upper=upper)


_TOKEN_TIS = Weight("token", "truncate", upper=2.0)

METHODS: dict[str, Method] = {
    "none": Method({}, "no correction; metrics only"),
    "token-tis": Method(
        {"weight": _TOKEN_TIS},
        "Yao et al., Off-policy RL (fengyao.notion.site/off-policy-rl); C = 2 customary",
    ),
    "token-mis": Method(
        {"weight": Weight("token", "mask", upper=2.0)},
        "one-sided masked IS, Beyond Precision (arXiv 2602.01826), C = 2",
    ),
    "icepop": Method(
        {"weight": Weight("token", "mask", 0.5, 5.0)},
        "Ring-1T (arXiv 2510.18855); 0.5 / 5.0 as in verl, NeMo-RL",
    ),
    "cis": Method(
        {"weight": Weight("token", "truncate", upper=3.3, growth="confidence", confidence_floor=5e-3)},
        "Confidence-aware IS (arXiv 2609.32444): min(rho, 1 + 2.3 max(1 - pi, 0.005))",
    ),
    "seq-tis": Method(
        {"weight": Weight("sequence", "truncate", upper=2.0)},
        "rl-collapse part 2; C = 2 as in verl; the metric suggested_seq_cap gives sqrt(2 (1 + chi2_seq))",
    ),
    "seq-mis": Method(
        {"weight": Weight("sequence", "mask", upper=2.0)},
        "rl-collapse part 3, one-sided; C = 2 as in Beyond Precision (arXiv 2602.01826)",
    ),
    "geo-mask": Method(
        {"reject": (_geometric_gate(0.999, 1.001),)},
        "rl-collapse part 3; 0.999 / 1.001 as in verl geo_rs; drops most responses of a few tokens",
    ),
    "geo-mask-token-tis": Method(
        {"weight": _TOKEN_TIS, "reject": (_geometric_gate(0.999, 1.001),)},
        "rl-collapse part 3; bounds as in verl, C = 2",
    ),
    "seq-mask-tis": Method(
        {"weight": _TOKEN_TIS, "reject": (_geometric_gate(0.999, 1.002),)},
        "NeMo-RL, ProRL v2: 0.999 / 1.002; its untruncated token weights are truncated at 2 here",
    ),
    "veto": Method(
        {"reject": (Rejection("ratio", "sequence", "min", lower=1e-4),)},
        "slime rs_veto_threshold 1e-4: one impossible token drops the sequence",
    ),
    "k3-reject": Method({"reject": (Rejection("k3", "sequence", "mean", upper=0.01),)}, "verl k3_rs 0.01 (0.001-0.01)"),
    "trust-region-mask": Method(
        {"reject": (Rejection("k2", "sequence", "max", upper=2.0),)},
        "Trust Region Masking (arXiv 2512.23075), max gate with the sample proxy k2; 2.0 (|l| <= 2) from verl's 1.5-3",
    ),
    "standardized": Method(
        {"weight": _TOKEN_TIS, "reject": (Rejection("standardized", "sequence", upper=2.0),)},
        "experimental: an outlier filter that keeps about 95 % of honest sequences at every length; derived, its bound "
        "as customary; the table below says what it costs",
    ),
    "prefix-tis": Method(
        {"weight": Weight("prefix", "truncate", upper=2.0)},
        "experimental: prefix ratios of CTPO (arXiv 2605.07331), with C = 2 of token-tis for its bounds that grow",
    ),
    "cispo": Method(
        {"old": "rollout", "surrogate": "cispo"},
        "MiniMax-M1 (arXiv 2506.13585) on current / mu; no lower bound as there, at most 4 as in Tinker",
        {"clip_lower": 1.0, "clip_upper": 3.0},
    ),
    "dppo": Method(
        {
            "reject": (
                Rejection("prob_diff", "token", upper=0.28, when="positive_advantage"),
                Rejection("prob_diff", "token", lower=-0.2, when="negative_advantage"),
            ),
            "old": "rollout",
            "surrogate": "cispo",
        },
        "Divergence PPO (arXiv 2602.04879), binary total variation, with the bounds of the trainer of TRL",
        {"clip_lower": 1.0, "clip_upper": 9.0},
    ),
    "centered": Method(
        {"old": "current", "centering": "top", "surrogate": "reinforce"},
        "score centering (arXiv 2609.20807) without a weight; needs rollout.top_logprobs",
    ),
    "centered-tis": Method(
        {"weight": _TOKEN_TIS, "old": "current", "centering": "top", "surrogate": "reinforce"},
        "score centering (arXiv 2609.20807) of token-tis; needs rollout.top_logprobs",
    ),
    "off-policy-sequence-mask": Method(
        {
            "reject": (Rejection("ratio", "sequence", "mean", lower=math.exp(-0.5), when="negative_advantage"),),
            "old": "rollout",
        },
        "DeepSeek-V3.2 eq. 9 on current / mu; lower = exp(-delta), delta unpublished: 0.5 as TRL suggests (slime 1e-4)",
    ),
}
"""Every preset; `PRESETS` has the corrections."""
