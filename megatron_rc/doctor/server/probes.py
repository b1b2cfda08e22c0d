"""Probes score the same tokens three times, which shows which side is wrong; they occupy a server for minutes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_rc.doctor.registry import Finding, Registry, Undecided, error, good, note, warning
from megatron_rc.doctor.server.facts import ServerFacts
from megatron_rc.doctor.server.scores import FINE_K3, Logprobs, Rescore, Scores, exact_share, k3, measure

Probes = Registry[Scores]
PROBES = Probes("probes")

BROKEN_K3 = 0.015
"""nats per token; prime-rl merges no change of its engines that lifts the gap above this."""
OWN_FACTOR = 3.0
"""Where rounding is coarse, a gap to the trainer counts if it is this many times that of the server to itself."""
FLOOR_FACTOR = 10.0
"""A gap counts if it is this many times the larger self-shift floor; gaps caused by rounding alone differ far less."""
ROUNDING_K3 = 1e-9
"""nats per token; the rounding of fp32 between two kernels stays below it."""
ROUNDING_FACTOR = 100.0
"""A small gap to the trainer that is this many times the server's own gap is more than rounding at equal precision."""
TEMPERATURES = tuple(2 ** (step / 8) for step in range(-8, 9))
"""Factors of the asked temperature, 9% apart: half a step changes k2 visibly, and the ends name common mistakes."""
SAME_TEMPERATURE = 2 ** (1.5 / 8)
"""Neighbouring temperatures of the sweep within this factor count as equal."""
SWEPT_TEMPERATURE = 0.7
"""Temperature of the sweep when the job's is 1, where a server that ignores the temperature would go unseen."""

SELF = (
    "Restart the server without CUDA graphs, prefix cache, speculative decoding and cascade attention, probe again, "
    "and switch them on one by one; look at the attention backend last."
)
TRAINER = (
    "Check that --hf-path holds the weights that the server serves now, then the conversion between both, and last the "
    "precision of each side."
)


def examine_probes(
    served: ServerFacts,
    rescore: Rescore,
    vocab_size: int,
    temperature: float,
    timeout_s: float,
    which: Probes = PROBES,
    usual: float = FINE_K3,
) -> list[Finding]:
    """Findings of all probes of one server; ``rescore`` is the trainer, ``temperature`` that of the job.

    ``usual``: k3 that the precision of the server explains.
    """
    asked = SWEPT_TEMPERATURE if temperature == 1 else temperature
    try:
        temperatures = [asked * factor for factor in TEMPERATURES]
        scores = replace(measure(served, rescore, vocab_size, asked, temperatures, timeout_s), usual=usual)
    except Undecided as missing:
        compares = "Log-probs of the server's decoding, its prefill and the trainer"
        return [Finding("probes", "note", str(missing), missing.fix, compares, decided=False)]
    return which.run(scores)


@PROBES.check
def self_shift(scores: Scores) -> Finding:
    """The server's prefill of each sequence alone against one batch of all of them."""
    compared = f"alone and in a batch of {scores.sequences} the server's own log-probs"
    fix = "Add --enable-deterministic-inference, or find the kernel whose answer depends on the batch."
    return _floor(scores.alone, scores.together, compared, "trainer", fix, scores.usual)


@PROBES.check
def trainer_self_shift(scores: Scores) -> Finding:
    """The trainer's log-probs of each sequence alone against one micro-batch of all of them."""
    if not np.isfinite(scores.trainer - scores.trainer_together).all():
        raise Undecided("the trainer's checkpoint gives log-probs that are not finite", TRAINER)
    compared = f"in micro-batches of 1 and of {scores.sequences} sequences the trainer's own log-probs"
    fix = "Find the trainer's kernel whose answer depends on the micro-batch, or raise its precision (train.dtype)."
    return _floor(scores.trainer, scores.trainer_together, compared, "server", fix, scores.usual)


def _floor(alone: Logprobs, together: Logprobs, compared: str, other: str, fix: str, usual: float) -> Finding:
    """How far one side's log-probs depend on the batch, which no change of the ``other`` side removes."""
    floor = k3(together - alone)
    share = exact_share(together, alone)
    found = f"{compared} differ by k3 {floor:.1e}, {share:.0%} of {len(alone)} tokens are exactly equal"
    if floor <= usual:
        return good(f"{found}; this is the floor that no change of the {other} removes")
    return (error if floor > max(BROKEN_K3, usual) else warning)(f"{found}, which is more than {usual:.1g}", fix)


@PROBES.check
def triangle(scores: Scores) -> Finding:
    """Decoding, prefill and trainer, each against each."""
    if not np.isfinite(scores.trainer).all():
        bad = f"{np.sum(~np.isfinite(scores.trainer))} of {len(scores.trainer)} tokens"
        return error(f"the trainer's checkpoint gives no finite log-prob for {bad}", TRAINER)
    floor = max(k3(scores.together - scores.alone), k3(scores.trainer_together - scores.trainer))
    pairs = {
        "decode-prefill": (scores.decode, scores.alone),
        "prefill-trainer": (scores.alone, scores.trainer),
        "decode-trainer": (scores.decode, scores.trainer),
    }
    gaps = {name: k3(b - a) for name, (a, b) in pairs.items()}
    numbers = ", ".join(f"{name} {gap:.1e} ({exact_share(*pairs[name]):.0%} equal)" for name, gap in gaps.items())
    said = f"k3 over {len(scores.decode)} tokens: {numbers}"
    # what the precision explains shows in the server itself, too
    within = max(FINE_K3, FLOOR_FACTOR * floor, min(scores.usual, OWN_FACTOR * gaps["decode-prefill"]))
    limits = dict.fromkeys(gaps, within) | {"decode-prefill": max(FLOOR_FACTOR * floor, scores.usual)}
    limit, large = max(limits.values()), {name: gap > limits[name] for name, gap in gaps.items()}
    if not any(large.values()):
        own = max(ROUNDING_K3, floor, gaps["decode-prefill"])
        if gaps["prefill-trainer"] > ROUNDING_FACTOR * own:
            return note(f"{said}; all are small, but equal weights in equal precision would be closer", TRAINER)
        return good(f"{said}; all are at most {limit:.1e}, and the trainer is as close as the server's own rounding")
    verdict, fix = _guilty(*large.values())
    passed = min(limits[name] for name in gaps if large[name])
    level: Callable[[str, str], Finding] = error if max(gaps.values()) > max(BROKEN_K3, limit) else warning
    return level(f"{verdict}; {said}, where {passed:.1e} is allowed", fix)


def _guilty(decode_prefill: bool, prefill_trainer: bool, decode_trainer: bool) -> tuple[str, str]:
    """The wrong side and its fix, decided by which of the three gaps are large; at least one is."""
    if not decode_prefill:
        causes = "weights, conversion or the trainer's numerics"
        return f"the server agrees with itself and not with the trainer: {causes}", TRAINER
    if not prefill_trainer:
        return "the server's decoding is wrong: its prefill agrees with the trainer", SELF
    if not decode_trainer:
        fix = "Train on the log-probs of decoding only, never on input_token_logprobs of this server."
        return "the server's prefill is wrong: its decoding agrees with the trainer", fix
    return "the server disagrees with itself, and neither decoding nor prefill agrees with the trainer", SELF


@PROBES.check
def temperature_sweep(scores: Scores) -> Finding:
    """The temperature at which the trainer fits the server's log-probs best against the asked one."""
    asked = scores.asked_temperature
    gaps = {t: float(np.mean((values - scores.warm) ** 2) / 2) for t, values in scores.warm_trainer.items()}
    best = min(gaps, key=gaps.__getitem__)
    at_asked = gaps[min(gaps, key=lambda t: abs(t - asked))]
    numbers = f"k2 {gaps[best]:.1e} at {best:.2g}, {at_asked:.1e} at {asked:.2g}"
    if max(best / asked, asked / best) <= SAME_TEMPERATURE or at_asked <= FINE_K3:
        return good(f"asked for temperature {asked:.2g}, the server's log-probs fit it ({numbers})")
    if gaps[best] > at_asked / 2:
        raise Undecided(f"no temperature explains the server's log-probs ({numbers})", TRAINER)
    fix = "Serve without SGLANG_RETURN_ORIGINAL_LOGPROB and without plugins that change logits"
    problem = f"asked for temperature {asked:.2g}, the server's log-probs are those of about {best:.2g} ({numbers})"
    return error(problem, f"{fix}, or divide by the same temperature in the trainer.")
