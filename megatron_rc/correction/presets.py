"""METHODS: named corrections, one row each, with the source of the form and of the bounds."""

import math
from typing import Any

from megatron_rc.correction.rejection import Rejection
from megatron_rc.correction.weight import Weight


def _geometric_gate(lower: float, upper: float) -> Rejection:
    return Rejection("ratio", "sequence", "mean", lower=lower, upper=upper)


_TOKEN_TIS = Weight("token", "truncate", upper=2.0)

METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "no correction; metrics only"),
    "token-tis": (
        {"weight": _TOKEN_TIS},
        "Yao et al., Off-policy RL (fengyao.notion.site/off-policy-rl); C = 2 customary",
    ),
    "token-mis": (
        {"weight": Weight("token", "mask", upper=2.0)},
        "one-sided masked IS, Beyond Precision (arXiv 2602.01826), C = 2",
    ),
    "icepop": (
        {"weight": Weight("token", "mask", 0.5, 5.0)},
        "Ring-1T (arXiv 2510.18855); 0.5 / 5.0 as in verl, NeMo-RL",
    ),
    "seq-tis": (
        {"weight": Weight("sequence", "truncate", upper=2.0)},
        "rl-collapse part 2; C = 2 as in verl; the metric suggested_seq_cap gives sqrt(2 (1 + chi2_seq))",
    ),
    "seq-mis": (
        {"weight": Weight("sequence", "mask", upper=2.0)},
        "rl-collapse part 3, one-sided; C = 2 as in Beyond Precision (arXiv 2602.01826)",
    ),
    "geo-mask": (
        {"reject": (_geometric_gate(0.999, 1.001),)},
        "rl-collapse part 3; 0.999 / 1.001 as in verl geo_rs; drops most responses of a few tokens",
    ),
    "geo-mask-token-tis": (
        {"weight": _TOKEN_TIS, "reject": (_geometric_gate(0.999, 1.001),)},
        "rl-collapse part 3; bounds as in verl, C = 2",
    ),
    "seq-mask-tis": (
        {"weight": _TOKEN_TIS, "reject": (_geometric_gate(0.999, 1.002),)},
        "NeMo-RL, ProRL v2: 0.999 / 1.002; its untruncated token weights are truncated at 2 here",
    ),
    "veto": (
        {"reject": (Rejection("ratio", "sequence", "min", lower=1e-4),)},
        "slime rs_veto_threshold 1e-4: one impossible token drops the sequence",
    ),
    "k3-reject": ({"reject": (Rejection("k3", "sequence", "mean", upper=0.01),)}, "verl k3_rs 0.01 (0.001-0.01)"),
    "trust-region-mask": (
        {"reject": (Rejection("k2", "sequence", "max", upper=2.0),)},
        "Trust Region Masking (arXiv 2512.23075), max gate with the sample proxy k2; 2.0 (|l| <= 2) from verl's 1.5-3",
    ),
    "standardized": (
        {"weight": _TOKEN_TIS, "reject": (Rejection("standardized", "sequence", upper=2.0),)},
        "experimental: an outlier filter that keeps about 95 % of honest sequences at every length; derived, its bound "
        "as customary; the table below says what it costs",
    ),
    "prefix-tis": (
        {"weight": Weight("prefix", "truncate", upper=2.0)},
        "experimental: prefix ratios of CTPO (arXiv 2605.07331), with C = 2 of token-tis for its bounds that grow",
    ),
    "off-policy-sequence-mask": (
        {
            "reject": (Rejection("ratio", "sequence", "mean", lower=math.exp(-0.5), when="negative_advantage"),),
            "old": "rollout",
        },
        "DeepSeek-V3.2 eq. 9 on current / mu; lower = exp(-delta), delta unpublished: 0.5 as TRL suggests (slime 1e-4)",
    ),
}
"""Every preset: its fields that are not at their default, and the origin of its form and bounds; `PRESETS` has the
corrections."""
