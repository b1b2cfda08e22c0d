"""What the literature and this project claim about collapse, as comparisons of arms of the lab.

Nothing here decides an answer: rules.py says how one follows from the numbers.
"""

import dataclasses
from functools import partial
from typing import Any

from collapse.rules import Claim, Comparison, collapses, early_k3, final, order, share

fell, failed, seen = (partial(share, event) for event in ("fell", "failed", "seen"))
NONE, CLIP = {"method": "none"}, {"method": "none, old: rollout"}
EXACT = {"mechanism": "exact", "strength": "", "method": "none"}
LAG, FIXED, NEW = ({"mechanism": name} for name in ("lag", "fixed noise", "resampled noise"))
TOP_P, LOW, HIGH = ({"mechanism": f"hidden {name}"} for name in ("top-p", "low temperature", "high temperature"))
FALL, FAIL = (f" {verb} more often than those of the exact sampler" for verb in ("fall", "fail"))
FIXED_NOISE, NEW_NOISE = "fixed noise on the sampler's weights", "noise that is new at every sync"
CLIPPED = ", whose PPO clip acts on pi / mu (old: rollout),"
SAID = {"none": "no correction", "none, old: rollout": "the PPO clip on pi / mu",
        "fixed noise": " under fixed noise", "resampled noise": " under new noise"}  # fmt: skip
"""Methods and gaps that questions call otherwise than the rows do."""


def beside(comparison: Comparison) -> Comparison:
    return dataclasses.replace(comparison, question=f"For comparison: {comparison.question}", beside=True)


def higher(method: str, other: str, gap: dict[str, Any] = LAG, **options: Any) -> Comparison:
    """A method ends higher than another one at the same gap."""
    question = f"{SAID.get(method, method)} ends higher than {SAID.get(other, other)}{SAID.get(gap['mechanism'], '')}"
    question += ", each at its own learning rate" if options.get("own_rates") else ""
    return Comparison(question, final, "more", gap | {"method": method}, {"method": other}, **options)


def safer(method: str, other: str) -> Comparison:
    question = f"{method} fails less often than {SAID.get(other, other)}"
    return Comparison(question, failed, "less", LAG | {"method": method}, {"method": other})


def controlled(method: str, than: str, control: str, **arm: Any) -> Comparison:
    """A method ends higher than its control, which is named in words and as in the rows."""
    question, arm = f"Control: {method} ends higher than {than}", LAG | {"method": method} | arm
    return Comparison(question, final, "more", arm, {"control": control}, seeds=5, beside=True)


def later(question: str, signal: str) -> Comparison:
    return Comparison(question, partial(order, signal), "more", NONE)


SHUFFLED = "with its weights shuffled within the batch", "shuffled-weights"
MEAN = "with the mean of its weights on every token", "mean-weight"
RANDOM = "a random mask of its own rate of rejection", "random-mask"
DECAY_30, DECAY_60 = (LAG | NONE | {"lr_rule": f"decay period {period}"} for period in (30, 60))
BY_K3, BY_ESS = (LAG | NONE | {"lr_rule": f"{signal} gate, scale"} for signal in ("k3", "ess"))
FP16, BF16 = ({"mechanism": f"{dtype} sampler and {dtype} trainer"} for dtype in ("fp16", "bf16"))
LR, THIRD, NO_RULE = {"lr": 3e-4}, LAG | NONE | {"lr": 1e-4}, {"lr_rule": "none"}

CLAIMS = (
    Claim("a", "A mismatch of sampler and trainer alone, without any lag, collapses a run.", (
        Comparison(f"Runs with {FIXED_NOISE}{FALL}", fell, "more", NONE | FIXED, EXACT),
        Comparison(f"Runs with {NEW_NOISE}{FALL}", fell, "more", NONE | NEW, EXACT),
        Comparison(f"Runs with fixed noise{CLIPPED}{FALL}", fell, "more", CLIP | FIXED, EXACT),
        Comparison(f"Runs with new noise{CLIPPED}{FALL}", fell, "more", CLIP | NEW, EXACT),
        beside(Comparison(f"runs with lag{CLIPPED}{FALL}", fell, "more", CLIP | LAG, EXACT)),
        Comparison(f"Runs with a hidden top-p{FALL}", fell, "more", NONE | TOP_P, EXACT),
        beside(Comparison(f"runs with a hidden low temperature{FALL}", fell, "more", NONE | LOW, EXACT)),
        Comparison(f"Runs with a hidden high temperature{FALL}", fell, "more", NONE | HIGH, EXACT),
        beside(Comparison(f"runs with lag{FALL}", fell, "more", NONE | LAG, EXACT)),
        beside(Comparison(f"runs with {FIXED_NOISE}{FAIL}", failed, "more", NONE | FIXED, EXACT)),
        beside(Comparison(f"runs with {NEW_NOISE}{FAIL}", failed, "more", NONE | NEW, EXACT)),
        beside(Comparison(f"runs with a hidden top-p{FAIL}", failed, "more", NONE | TOP_P, EXACT)),
    ), seeds=10, holds="somewhere"),
    Claim("b", "Corrections of whole sequences hold where corrections of single tokens fail.", (
        safer("seq-tis", "token-tis"),
        higher("seq-tis", "token-tis"),
        higher("seq-tis", "token-tis", own_rates=True, seeds=5),
        beside(higher("seq-tis", "none", own_rates=True, seeds=5)),
        beside(higher("token-tis", "none", own_rates=True, seeds=5)),
        controlled("seq-tis", *SHUFFLED, **LR),
        controlled("seq-tis", *MEAN, **LR),
        controlled("token-tis", *SHUFFLED, **LR),
        beside(safer("token-tis", "none")),
        beside(safer("seq-tis", "none")),
        beside(Comparison(
            "the PPO clip on pi / mu (old: rollout) fails less often than old log-probs that are recomputed",
            failed, "less", LAG | CLIP, NONE)),
        beside(higher("token-tis", CLIP["method"])),
        beside(higher("seq-tis", CLIP["method"])),
        beside(higher("none", CLIP["method"], FIXED, seeds=3)),
        beside(higher("seq-tis", "none", FIXED, seeds=3)),
        beside(higher("seq-tis", "none", NEW, seeds=3)),
        beside(higher("seq-tis", "token-tis", FIXED, seeds=3)),
    ), seeds=10),
    Claim("c", "Masking ends higher than truncation; the geometric gate fails less often than no correction.", (
        higher("token-mis", "token-tis"),
        higher("seq-mis", "seq-tis"),
        safer("geo-mask", "none"),
        *(controlled(method, *RANDOM) for method in ("seq-mis", "token-mis", "geo-mask")),
    ), seeds=10),
    Claim("d", "A lower or decayed learning rate saves or delays; too long a period does not.", (
        Comparison("A third of the learning rate collapses later", collapses, "less", THIRD, LR),
        Comparison("A third of the learning rate fails less often", failed, "less", THIRD, LR),
        Comparison("A decay period of 30 steps collapses later", collapses, "less", DECAY_30, NO_RULE),
        Comparison("A decay period of 30 steps fails less often", failed, "less", DECAY_30, NO_RULE),
        Comparison("A decay period of 60 steps fails as often as none", failed, "same", DECAY_60, NO_RULE),
        beside(Comparison("a learning rate that follows k3 fails less often", failed, "less", BY_K3, NO_RULE, seeds=5)),
    ), seeds=10),
    Claim("e", "k3 rises before the gradient norm, the perplexity and the fall of the reward.", (
        later("The gradient norm rises later than k3", "grad_norm"),
        later("The log-perplexity rises later than k3", "log_ppl"),
        later("The held-out accuracy falls later than k3 rises", "accuracy"),
        beside(later(
            "the reward of the rollouts, dated by the weights that drew them, falls later than k3 rises", "reward")),
        beside(later("the effective sample size falls later than k3 rises", "ess")),
        beside(later("responses grow longer later than k3 rises", "length")),
    )),
    Claim("f", "Sampling and training in fp16 instead of bf16 closes the gap and saves runs.", (
        Comparison("k3 is smaller in fp16", early_k3, "less", FP16 | NONE, BF16),
        Comparison("fp16 fails less often", failed, "less", FP16 | NONE, BF16),
    )),
    Claim("g", "Replaying the routes of the sampler closes the gap of a mixture of experts and saves runs.", (
        Comparison("k3 is smaller with R3", early_k3, "less", {"method": "none with R3"}, NONE),
        Comparison("R3 fails less often", failed, "less", {"method": "none with R3"}, NONE),
        beside(Comparison("k3 is smaller with R2", early_k3, "less", {"method": "none with R2"}, NONE)),
    )),
    Claim("h", "Batch normalisation of the weights, a learning rate scaled by ESS and the standardised gate improve on "
          "token-tis.", (
        Comparison("Batch normalisation ends higher than token-tis alone", final, "more",
                   LAG | {"method": "token-tis, normalize: batch"}, {"method": "token-tis"}),
        beside(Comparison("batch normalisation ends higher than seq-tis alone", final, "more",
                          LAG | {"method": "seq-tis, normalize: batch"}, {"method": "seq-tis"})),
        Comparison("A learning rate scaled by ESS ends higher than a constant one", final, "more",
                   BY_ESS | {"method": "token-tis"}, NO_RULE),
        higher("standardized", "token-tis"),
    )),
    Claim("i", "A hidden change of sampling leaves k3 as it is, while z_W of megatron-rc analyze sees it.", tuple(
        Comparison(f"{what} a {gap['mechanism']}", measure, expect, gap | NONE, EXACT)
        for what, measure, expect in (("k3 is the same under", early_k3, "same"), ("z_W sees", seen, "more"))
        for gap in (TOP_P, LOW, HIGH)
    )),
)  # fmt: skip
