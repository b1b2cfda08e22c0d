"""Which metric is drawn where: one table from metric keys to panels, and the series behind each panel."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Record = Mapping[str, Any]


class Curve(NamedTuple):
    label: str
    keys: tuple[str, ...]
    """The first of these keys that the run has is drawn."""


class Panel(NamedTuple):
    title: str
    unit: str
    curves: tuple[Curve, ...]
    meaning: str
    healthy: str
    logarithmic: bool = False
    noisy: bool = False
    """Drawn faint, with its moving average on top."""
    phase: str = "rl"
    in_picture: bool = False
    """Also drawn in the PNG."""
    marked: bool = False
    """Shows where the length surged and where the learning rate was cut."""


class Mark(NamedTuple):
    step: int
    label: str


class Series(NamedTuple):
    label: str
    steps: list[int]
    values: list[float]


def _pair(label: str, name: str) -> Curve:
    """A metric of trainer and sampler: before the update where it was measured, else during it."""
    return Curve(label, (f"old/{name}", f"current/{name}"))


ACCURACY = Curve("held-out accuracy", ("eval/accuracy",))
REWARD = Curve("reward", ("reward/mean", "reward"))
LENGTH = Curve("response length", ("response_length/mean", "old/response_length", "current/response_length"))
K3 = _pair("k3", "k3")
ESS = _pair("ESS", "ess_token")
MASKED = _pair("masked", "masked_token")
GRAD_NORM = Curve("gradient norm", ("grad_norm",))
LEARNING_RATE = Curve("learning rate", ("lr",))
LR_SCALE = Curve("length-decay scale", ("lr_decay/scale",))
SURGE_STEP = Curve("surge step", ("lr_decay/surge_step",))
DECAY_PERIOD = Curve("decay period", ("lr_decay/period",))
THROUGHPUT = Curve("tokens/s", ("tokens_per_second",))
CROSS_ENTROPY = Curve("cross-entropy", ("cross_entropy",))
STEP_SECONDS = Curve("step", ("time/step_s",))

PANELS = (
    Panel(
        "Reward", "mean of the step", (REWARD,),
        "What the sampler's answers earned before the update of each step.",
        "rises, then levels off; a sudden fall to zero is a collapse.", noisy=True, in_picture=True,
    ),
    Panel(
        "Held-out accuracy", "mean reward", (ACCURACY,),
        "The same reward on problems that are never trained on, sampled at the rollout temperature.",
        "follows the reward; a growing gap below it is memorisation.", in_picture=True,
    ),
    Panel(
        "k3: KL(sampler || trainer)", "nats per token",
        (Curve("old / sampler", ("old/k3",)), Curve("current / sampler", ("current/k3",)),
         Curve("current / old", ("current_old/k3",))),
        "Mean of eˡ − 1 − l, with l = log π − log μ of a sampled token: how far apart both engines are.",
        "flat; 1e-5 to 1e-3 is ordinary for two engines, growth by orders of magnitude precedes a collapse.",
        logarithmic=True, noisy=True, in_picture=True,
    ),
    Panel(
        "Response length", "tokens", (LENGTH,),
        "Tokens that the sampler drew per response.",
        "changes slowly; a surge often comes before the gradient noise that ends a run.", noisy=True, in_picture=True,
        marked=True,
    ),
    Panel(
        "Effective sample size", "fraction of the batch",
        (Curve("tokens", ("old/ess_token", "current/ess_token")),
         Curve("sequences", ("old/ess_seq", "current/ess_seq")),
         Curve("tokens, after correction", ("old/ess_token_final", "current/ess_token_final")),
         Curve("sequences, after correction", ("old/ess_seq_final", "current/ess_seq_final"))),
        "(Σρ)² / (n Σρ²) with ρ = π/μ: the share of the batch that still informs the gradient once it is weighted.",
        "near 1; below about 0.5 a few tokens or sequences decide the step.", noisy=True, in_picture=True,
    ),
    Panel(
        "log_ppl_abs_diff", "nats per token", (_pair("log_ppl_abs_diff", "log_ppl_abs_diff"),),
        "Mean over sequences of |mean l|: both engines' log-perplexities apart, nothing cancels.",
        "flat and small; it grows with the mismatch even where k3 looks calm.", noisy=True,
    ),
    Panel(
        "Log-perplexity", "nats per token",
        (_pair("trainer", "train_log_ppl"), _pair("sampler", "rollout_log_ppl")),
        "Mean negative log-probability of the sampled answers, by each engine; its exp is the perplexity.",
        "the two curves lie on one another; both fall as the policy becomes sure.",
    ),
    Panel(
        "Entropy", "nats per token", (Curve("entropy", ("entropy", "entropy/mean")),),
        "Mean entropy of the trainer's distribution at the sampled positions.",
        "falls slowly; near 0 there is nothing left to explore.",
    ),
    Panel(
        "Corrected share", "fraction",
        (_pair("weight truncated", "truncated_token"), _pair("weight clipped below", "clipped_low_token"),
         _pair("weight clipped above", "clipped_high_token"), _pair("masked tokens", "masked_token"),
         _pair("masked sequences", "masked_seq")),
        "How much of the batch the correction touched: weights cut to their bound, tokens or sequences dropped.",
        "a few percent at most; more means that the bounds, not the rewards, steer the update.", noisy=True,
    ),
    Panel(
        "Batch share", "fraction",
        (Curve("cut off at max_new_tokens", ("response_length/truncated", "truncated")),
         Curve("groups of equal rewards, dropped", ("groups/equal_reward", "equal_reward_groups")),
         Curve("PPO ratio clipped above", ("clip_high",)),
         Curve("PPO ratio clipped below", ("clip_low",))),
        "Responses that hit the length limit, groups without a learning signal, and tokens at the PPO clip bound.",
        "cut-off near 0; dropped groups grow as the task is solved; few clipped tokens.",
    ),
    Panel(
        "Gradient norm", "before clipping", (GRAD_NORM,),
        "Euclidean norm of the gradient of the whole model.",
        "steady; a rising trend with rising k3 is the signature of mismatch.", noisy=True, in_picture=True,
    ),
    Panel(
        "Learning rate", "per optimizer step", (LEARNING_RATE,),
        "What the optimizer used at the end of the step.", "as the schedule says.", marked=True,
    ),
    Panel(
        "Throughput", "tokens per second", (THROUGHPUT,),
        "Prompt and response tokens of the batch over the time of the whole step.", "steady.", noisy=True,
    ),
    Panel(
        "Warm-up: cross-entropy", "nats per token", (CROSS_ENTROPY,),
        "Loss on the demonstrations of the supervised warm-up.", "falls steadily.", phase="warmup", noisy=True,
    ),
    Panel(
        "Warm-up: held-out accuracy", "mean reward", (ACCURACY,),
        "Where reinforcement learning starts from.", "between 20 % and 50 %, so that groups have mixed rewards.",
        phase="warmup",
    ),
)  # fmt: skip


def phase_of(record: Record) -> str:
    return str(record.get("phase", "rl"))


def value_of(record: Record, curve: Curve) -> float | None:
    """The finite value of ``curve`` in one record, else None."""
    for key in curve.keys:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def series(records: Sequence[Record], panel: Panel) -> list[Series]:
    """The curves of ``panel`` that have at least one finite value; a logarithmic panel leaves out values <= 0."""
    found = []
    for curve in panel.curves:
        keys = [key for key in curve.keys if any(key in record for record in records)]
        points = [
            (int(record["step"]), value)
            for record in records
            if phase_of(record) == panel.phase
            and (value := value_of(record, Curve(curve.label, tuple(keys[:1])))) is not None
            and (value > 0 or not panel.logarithmic)
        ]
        if points:
            found.append(Series(curve.label, [step for step, _ in points], [value for _, value in points]))
    return found


def marks(records: Sequence[Record]) -> list[Mark]:
    """The surge of the response length, and every step at which the length decay cut the learning rate."""
    rl = [r for r in records if phase_of(r) == "rl"]
    surges = [v for r in rl if (v := value_of(r, SURGE_STEP)) is not None]
    found = [Mark(int(surges[-1]), "surge")] if surges else []
    before = 1.0
    for record in rl:
        scale = value_of(record, LR_SCALE)
        if scale is not None and scale < before:
            found.append(Mark(int(record["step"]), f"×{scale:.3g}"))
        before = before if scale is None else scale
    return found


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean over the ``window`` values around each one, as many of them as there are at the ends."""
    half, total = window // 2, list(itertools.accumulate(values, initial=0.0))
    spans = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(total[end] - total[start]) / (end - start) for start, end in spans]


def smoothed(values: Sequence[float]) -> list[float]:
    """The moving average that is drawn on top of a noisy curve."""
    return moving_average(values, max(5, len(values) // 12))


class Headline(NamedTuple):
    label: str
    value: str
    note: str


def headlines(records: Sequence[Record]) -> list[Headline]:
    """The numbers that stand on top of a report; those that the run lacks are left out."""
    rl = [r for r in records if phase_of(r) == "rl"]
    found = []
    accuracies = [v for r in records if (v := value_of(r, ACCURACY)) is not None]
    reinforced = [v for r in rl if (v := value_of(r, ACCURACY)) is not None]
    if reinforced:
        # the last evaluation of the warm-up, unless there was one at step 0
        measured_at_start = len(reinforced) == len(accuracies) or value_of(rl[0], ACCURACY) is not None
        before = reinforced[0] if measured_at_start else accuracies[-len(reinforced) - 1]
        gain = 100 * (reinforced[-1] - before)
        change = f"{100 * before:.1f} % → {100 * reinforced[-1]:.1f} %"
        found.append(Headline("Held-out accuracy", change, f"{gain:+.1f} points by reinforcement learning"))
    k3 = [v for r in rl if (v := value_of(r, K3)) is not None]
    if k3:
        found.append(Headline("k3 at the end", f"{k3[-1]:.2e}", f"nats per token; {k3[0]:.2e} at the start"))
    steps = [int(r["step"]) for r in rl]
    if steps:
        warmup = sum(phase_of(r) == "warmup" for r in records)
        found.append(Headline("Steps", f"{max(steps)}", f"after {warmup} of warm-up" if warmup else "no warm-up"))
    surges = [v for r in rl if (v := value_of(r, SURGE_STEP)) is not None]
    periods = [v for r in rl if (v := value_of(r, DECAY_PERIOD)) is not None]
    if surges:
        note = f"learning rate halves every {periods[-1]:.0f} steps"
        found.append(Headline("Response length surged", f"step {surges[-1]:.0f}", note))
    rates = [v for r in rl if (v := value_of(r, THROUGHPUT)) is not None]
    if rates:
        found.append(Headline("Tokens per second", f"{statistics.median(rates):,.0f}", "median step, all processes"))
    seconds = [v for r in rl if (v := value_of(r, STEP_SECONDS)) is not None]
    if seconds:
        mean = f"{statistics.fmean(seconds):.2f} s a step, evaluation included"
        found.append(Headline("Time in steps", duration(sum(seconds)), mean))
    return found


def duration(seconds: float) -> str:
    """Seconds as 0:42, 5:03 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
