"""Every panel of a report, in one table: which metrics it draws, what they mean and what a healthy run shows.

A new metric needs an entry here, and nothing else, to appear in report.html.
"""

import itertools
from collections.abc import Mapping
from typing import Literal, NamedTuple

from megatron_rc.correction.sums import LAG_BINS
from megatron_rc.drawing.axes import label_of
from megatron_rc.learning_rate.rule import RULES
from megatron_rc.learning_rate.scale import PREFIX


class Curve(NamedTuple):
    label: str
    keys: tuple[str, ...]
    """Names of the metric in metrics.jsonl; the first one that the run has is drawn."""
    of_correction: bool = False
    """Says nothing in a run that corrects nothing."""


class Panel(NamedTuple):
    title: str
    unit: str
    curves: tuple[Curve, ...]
    meaning: str
    healthy: str
    logarithmic: bool = False
    noisy: bool = False
    """Draw the values faintly, with their moving average on top."""
    phase: Literal["warmup", "rl"] = "rl"
    in_picture: bool = False
    """Draw the panel in the PNG, too."""
    marked: bool = False
    """Mark the steps at which the length surged and the learning rate was cut."""
    floor: float = 0.0
    """Smaller values are rounding, and drawn there."""
    span: tuple[float, float] | None = None
    """Range that the vertical axis has at least, so that rounding does not look like a trend."""

    @property
    def scale(self) -> str:
        """The unit, and where the vertical axis is cut."""
        return f"{self.unit}, rounding below {label_of(self.floor)}" if self.floor else self.unit


class HeatPanel(NamedTuple):
    title: str
    name: str
    """Name of a metric that is a list, without the prefix of its pair."""
    rows: Literal["layer", "margin", "position"]
    """What each number of the list belongs to."""
    meaning: str


def _against_sampler(names: Mapping[str, str]) -> tuple[Curve, ...]:
    """Label -> name; trainer against sampler, measured before the update if the run has that, else during it."""
    return tuple(Curve(label, (f"old/{name}", f"current/{name}")) for label, name in names.items())


def _of_correction(names: Mapping[str, str]) -> tuple[Curve, ...]:
    return tuple(curve._replace(of_correction=True) for curve in _against_sampler(names))


def _against_old(names: Mapping[str, str]) -> tuple[Curve, ...]:
    """Label -> name; trainer during the update against trainer before it."""
    return tuple(Curve(label, (f"current_old/{name}",)) for label, name in names.items())


def _by_lag(name: str) -> dict[str, str]:
    """One curve per bin of lags; a bin without tokens is not drawn."""
    return {each.label: f"{name}_lag_{lags}" for lags, each in LAG_BINS.items()}


def _rejected_routes(label: str, unit: Literal["token", "seq"]) -> Curve:
    """Share that a gate on the statistic route_shift drops; the keys are those of every level of such a gate."""
    units = itertools.product(("sequence", "segment"), ("mean", "sum", "max", "min"))
    levels = ("token", *map("_".join, units))
    return Curve(label, tuple(f"old/rejected_route_shift_{level}_{unit}" for level in levels))


ACCURACY = Curve("held-out accuracy", ("eval/accuracy",))
REWARD = Curve("reward", ("reward/mean",))
LENGTH = Curve("response length", ("response_length/mean", "old/response_length", "current/response_length"))
K3, ESS, MASKED = _against_sampler({"k3": "k3", "ESS": "ess_token", "masked": "masked_token"})
GRAD_NORM = Curve("gradient norm", ("grad_norm",))
LEARNING_RATE = Curve("learning rate", ("lr",))
LR_FACTOR = Curve("factor", (f"{PREFIX}scale",))
HALVES = Curve("factor that never grows again", tuple(f"{PREFIX}{rule.halves}" for rule in RULES.values()))
SURGE_STEP = Curve("surge step", (f"{PREFIX}surge_step",))
SURGE_IN_WARMUP = Curve("surge in the warm-up", (f"{PREFIX}surge_in_warmup",))
DECAY_PERIOD = Curve("decay period", (f"{PREFIX}period",))
THROUGHPUT = Curve("tokens/s", ("tokens_per_second",))
CROSS_ENTROPY = Curve("cross-entropy", ("cross_entropy",))
STEP_SECONDS = Curve("step", ("time/step_s",))
ROUNDING = 1e-7
"""nats; a k3 up to this is what rounding in fp32 leaves of two equal policies."""
SHARES = (0.0, 1.0)
"""All values that a share can have."""

PANELS = (
    Panel("Reward", "mean of the step", (REWARD,),
        "Mean reward of the sampled responses, before the update of each step.",
        "rises, then levels off; a sudden fall to zero is a collapse.", noisy=True, in_picture=True),
    Panel("Held-out accuracy", "mean reward", (ACCURACY,),
        "Mean reward on problems that are never trained on, sampled at the rollout temperature.",
        "follows the reward; a growing gap below it is memorisation.", in_picture=True),
    Panel("k3: KL(sampler || trainer)", "nats per token",
        (Curve("old / sampler", ("old/k3",)), Curve("current / sampler", ("current/k3",)),
         Curve("current / old", ("current_old/k3",))),
        "Mean of eˡ − 1 − l, with l = log π − log μ of a sampled token: how far apart sampler and trainer are.",
        "flat; 1e-5 to 1e-3 is normal for two engines, growth by orders of magnitude precedes a collapse.",
        logarithmic=True, noisy=True, in_picture=True, floor=ROUNDING),
    Panel("k3: mismatch and staleness", "nats per token",
        _against_sampler({"mismatch": "mismatch_k3", "staleness": "staleness_k3"}),
        "k3 of the two factors of ρ: mismatch compares the trainer at the version that sampled with the sampler, "
        "staleness the trainer with itself at that version.",
        "mismatch as flat as without staleness; staleness grows with the learning rate and the age.",
        logarithmic=True, noisy=True, floor=ROUNDING),
    Panel("Effective sample size: mismatch and staleness", "fraction of the batch",
        _against_sampler({"mismatch": "mismatch_ess", "staleness": "staleness_ess"}),
        "(Σρ)² / (n Σρ²) over tokens, with one factor of ρ instead of ρ.",
        "near 1; the lower factor says whether to look at the engines or at the age of the samples.", noisy=True,
        span=SHARES),
    Panel("Response length", "tokens", (LENGTH,),
        "Mean number of sampled tokens per response.",
        "changes slowly; a surge often comes before the gradient noise that ends a run.", noisy=True, in_picture=True,
        marked=True),
    Panel("Effective sample size", "fraction of the batch",
        (*_against_sampler({"tokens": "ess_token", "sequences": "ess_seq"}),
         *_of_correction({"tokens, after correction": "ess_token_final",
                          "sequences, after correction": "ess_seq_final"}),
         Curve("sequences, predicted from k3", ("ess_seq_predicted",))),
        "(Σρ)² / (n Σρ²) with ρ = π/μ: the share of the batch that still informs the gradient once it is weighted.",
        "near 1; below about 0.5 a few tokens or sequences decide the step.", noisy=True, in_picture=True, span=SHARES),
    Panel("Persistence of the gap", "cosine", (Curve("persistence", ("persistence",)),),
        "Cosine of what trainer and sampler differ by at each token id, in this rollout and in the one before.",
        "near 0 for rounding; near 1 they differ in the same way every time: stale weights, or a sampler that is off.",
        noisy=True, span=(-1.0, 1.0)),
    Panel("Distance of log-perplexities", "nats per token", _against_sampler({"distance": "log_ppl_abs_diff"}),
        "Mean over sequences of |mean l|: the distance of the two log-perplexities, where differences cannot cancel.",
        "flat and small; it grows with the mismatch even where k3 looks calm.", noisy=True, span=(0.0, 1e-3)),
    Panel("Log-perplexity", "nats per token",
        _against_sampler({"trainer": "train_log_ppl", "sampler": "rollout_log_ppl"}),
        "Mean negative log-probability of the sampled responses, by each engine; its exp is the perplexity.",
        "the two curves coincide, and both fall as the policy becomes sure."),
    Panel("Entropy", "nats per token", (Curve("entropy", ("entropy",)),),
        "Mean entropy of the trainer's distribution at the sampled positions.",
        "falls slowly; near 0 there is nothing left to explore."),
    Panel("Corrected share", "fraction",
        _of_correction({"weight truncated": "truncated_token", "weight clipped below": "clipped_low_token",
                        "weight clipped above": "clipped_high_token", "masked tokens": "masked_token",
                        "masked sequences": "masked_seq"}),
        "How much of the batch the correction touched: weights cut to their bound, tokens or sequences dropped.",
        "a few percent at most; more means that the bounds, not the rewards, steer the update.", noisy=True),
    Panel("Batch share", "fraction",
        (Curve("cut off at max_new_tokens", ("response_length/truncated",)),
         Curve("groups of equal rewards, dropped", ("groups/equal_reward",)),
         Curve("PPO ratio clipped above", ("clip_high",)),
         Curve("PPO ratio clipped below", ("clip_low",))),
        "Responses that hit the length limit, groups without a learning signal, and tokens at the PPO clip bound.",
        "cut-off near 0; dropped groups grow as the task is solved; few clipped tokens."),
    Panel("k3 by lag", "nats per token", _against_sampler(_by_lag("k3")),
        "k3 of the tokens that were sampled that many updates ago.",
        "rises with the lag, and not over the run.", logarithmic=True, noisy=True, floor=ROUNDING),
    Panel("Effective sample size by lag", "fraction of the bin", _against_sampler(_by_lag("ess_token")),
        "(Σρ)² / (n Σρ²) over the tokens that were sampled that many updates ago.",
        "falls with the lag; a bin near 0 adds noise and little else.", noisy=True, span=SHARES),
    Panel("Masked share by lag", "fraction of the bin", _of_correction(_by_lag("masked_token")),
        "Share of the tokens of that lag that the correction dropped.",
        "about the same in every bin; a bin near 1 was sampled for nothing.", noisy=True),
    Panel("Tokens by lag", "fraction", _against_sampler(_by_lag("tokens")),
        "Share of the batch that was sampled that many updates ago.", "steady.", noisy=True),
    Panel("Gradient norm", "before clipping", (GRAD_NORM,),
        "Euclidean norm of the gradient of the whole model.",
        "steady; a rising trend with rising k3 is the signature of mismatch.", noisy=True, in_picture=True),
    Panel("Learning rate", "per optimizer step", (LEARNING_RATE,),
        "Learning rate of the last optimizer step.", "follows the schedule.", marked=True),
    Panel("Idle time", "fraction",
        (Curve("trainer", ("asynchronous/trainer_idle",)), Curve("engine", ("asynchronous/engine_idle",))),
        "Time between two changes of the engine's weights in which the trainer waited for a rollout, and in which none "
        "was being sampled; with train.asynchronous.",
        "both near 0; where one is near 0 and the other large, the first is the bottleneck.", noisy=True),
    Panel("Learning-rate rule", "factor, and its signal",
        (LR_FACTOR, *(Curve(metric.curve, (f"{PREFIX}{name}",)) for rule in RULES.values()
                      for name, metric in rule.metrics.items() if metric.curve)),
        "Factor on the scheduled learning rate, and the signal of the rollout that decided it.",
        "the factor stays at 1; a long stay below it means that the correction leaves too little of each batch.",
        logarithmic=True),
    Panel("Throughput", "tokens per second", (THROUGHPUT,),
        "Prompt and response tokens of the batch, divided by the time of the whole step.", "steady.", noisy=True),
    Panel("Warm-up: cross-entropy", "nats per token", (CROSS_ENTROPY,),
        "Loss on the demonstrations of the supervised warm-up.", "falls steadily.", phase="warmup", noisy=True),
    Panel("Warm-up: held-out accuracy", "mean reward", (ACCURACY,),
        "Accuracy that reinforcement learning starts from.",
        "between 20 % and 50 %, so that groups have mixed rewards.", phase="warmup"),
)  # fmt: skip

_EXPERTS_OF_A_TOKEN = "S are the experts that the trainer's router chooses for a token in a layer, S' the sampler's."
ROUTE_PANELS = (
    Panel("Expert overlap", "fraction",
        _against_sampler({"overlap, sampler": "route_overlap", "Jaccard, sampler": "route_jaccard"})
        + _against_old({"overlap, old": "route_overlap", "Jaccard, old": "route_jaccard"}),
        f"|S ∩ S'| / k and |S ∩ S'| / |S ∪ S'|. {_EXPERTS_OF_A_TOKEN} In the curves called old, S' is the trainer's "
        "choice before the update.",
        "above 0.95; the curves called old show how much of the shift one gradient step causes.", noisy=True),
    Panel("Decisions and tokens that differ", "fraction",
        _against_sampler({"decisions, sampler": "route_any_diff", "tokens, sampler": "route_tokens_touched"})
        + _against_old({"decisions, old": "route_any_diff", "tokens, old": "route_tokens_touched"}),
        "Share of (token, layer) with S ≠ S', and of tokens with at least one such layer.",
        "decisions: a few percent; tokens: up to nearly 1 in a deep model.", noisy=True),
    Panel("Layers that differ", "layers",
        _against_sampler({"differing layers per token": "route_layers_differing",
                          "first differing layer": "route_first_layer"}),
        "How many layers of a token have other experts, and which layer is the first of them, counted from 0.",
        "few and late: an early difference disturbs every layer above it.", noisy=True),
    Panel("Gate distance", "L1",
        _against_sampler({"sampler's experts": "route_gate_l1"}) + _against_old({"old": "route_gate_l1"}),
        "Σ |g(e) − g'(e)| of the gate weights; 2 means that no expert is shared. The sampler returns its experts but "
        "not their weights, so both gates are the trainer's.",
        "small next to the share of decisions that differ: the experts that change have little weight.", noisy=True),
    Panel("Router KL", "nats per decision", _against_old({"KL(old || current)": "route_kl"}),
        "Divergence of the router's softmax over the old experts and one cell for all others.",
        "follows the learning rate.", logarithmic=True, noisy=True),
    Panel("Top-k margin", "nats", _against_sampler({"mean margin": "route_margin"}),
        "Score of the last expert that is taken minus that of the first one that is not: how close the decision is.",
        "steady; with a shrinking margin, smaller errors change experts.", noisy=True),
    Panel("|l| with and without expert shift", "nats per token",
        _against_sampler({"shifted tokens": "abs_log_ratio_shifted", "other tokens": "abs_log_ratio_unshifted"}),
        "Mean |log π − log μ| of tokens with S ≠ S' in some layer, and of the others.",
        "close together; a gap means that the routes cause the mismatch.", logarithmic=True, noisy=True),
    Panel("F(2) with and without expert shift", "fraction of tokens",
        _against_sampler({"all": "f2", "shifted tokens": "f2_shifted", "other tokens": "f2_unshifted"}),
        "Share of tokens with max(ρ, 1/ρ) > 2.", "near 0.", noisy=True),
    Panel("Load change", "fraction of a layer's assignments",
        _against_sampler({"sampler": "route_load_change"}) + _against_old({"old": "route_load_change"}),
        "Half of Σ |load(e) − load'(e)|, mean over layers: work that moved to other experts.",
        "well below the share of decisions that differ: flips cancel unless they have a direction.", noisy=True),
    Panel("Replay", "fraction",
        (Curve("rows replayed", ("replay/share",)), Curve("router disagrees", ("replay/disagreement",))),
        "Rows whose experts were replayed, and replayed decisions in which the router would have taken other experts.",
        "rows near 1: all but the last token of a sequence; disagreement grows with the distance of the two policies.",
        noisy=True),
    Panel("Rejected for their routes", "fraction",
        (_rejected_routes("tokens", "token"), _rejected_routes("sequences", "seq")),
        "Share that a rejection on route_shift dropped.", "a few percent at most.", noisy=True),
)  # fmt: skip
"""Shown for runs that recorded routes."""

HEAT_PANELS = (
    HeatPanel("Decisions that differ", "route_any_diff_by_layer", "layer", "Share with S ≠ S'."),
    HeatPanel("Overlap", "route_overlap_by_layer", "layer", "Mean |S ∩ S'| / k."),
    HeatPanel("Jaccard", "route_jaccard_by_layer", "layer", "Mean |S ∩ S'| / |S ∪ S'|."),
    HeatPanel("First differing layer", "route_first_layer_by_layer", "layer", "Share of shifted tokens."),
    HeatPanel("Gate distance", "route_gate_l1_by_layer", "layer", "Mean Σ |g(e) − g'(e)|."),
    HeatPanel("Router KL", "route_kl_by_layer", "layer", "KL(old || current), nats."),
    HeatPanel("Top-k margin", "route_margin_by_layer", "layer", "Mean margin, nats."),
    HeatPanel("Load change", "route_load_change_by_layer", "layer", "Half of Σ |load(e) − load'(e)|."),
    HeatPanel("|l| where the layer differs", "abs_log_ratio_shifted_by_layer", "layer", "Nats per token."),
    HeatPanel("|l| where it does not", "abs_log_ratio_unshifted_by_layer", "layer", "Nats per token."),
    HeatPanel("Differing decisions by margin", "route_any_diff_by_margin", "margin", "Share of its decisions."),
    HeatPanel("Shifted tokens by position", "route_tokens_touched_by_position", "position", "Share of its tokens."),
    HeatPanel("|l| of shifted tokens", "abs_log_ratio_shifted_by_position", "position", "Nats per token."),
    HeatPanel("|l| of other tokens", "abs_log_ratio_unshifted_by_position", "position", "Nats per token."),
)
"""Maps of a list metric over steps."""
EXPERTS = HeatPanel(
    "Load change of every expert", "route_load_change_by_expert", "layer",
    "load(e) − load'(e) at the last step, as a share of the layer's assignments.",
)  # fmt: skip
"""Map of layers and experts at the last step."""
