"""Numbers and verdicts in words, shared by the terminal, the page and the documents."""

import math
from collections.abc import Mapping
from typing import Any

from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.headline import OFFSET
from megatron_rc.analyze.rules.rc102 import RATIO_FLOOR
from megatron_rc.analyze.rules.rule import Level, Verdict
from megatron_rc.analyze.statistics.drift import AtLength, Drift
from megatron_rc.analyze.statistics.grid import grid, logit_grid
from megatron_rc.analyze.statistics.growth import Growth
from megatron_rc.analyze.statistics.honesty import Honesty
from megatron_rc.analyze.statistics.profile import Profile
from megatron_rc.analyze.statistics.significance import Test
from megatron_rc.analyze.statistics.tail import LIMIT
from megatron_rc.analyze.statistics.what_if import WhatIf, WhatIfTable
from megatron_rc.correction.warnings import horizon

ONE_TOKEN = 0.5
"""Share of k3 from which a single token is named."""
SERIES_LEVEL = 0.01
"""Two series of a run are said to move together if the corrected p is below this."""
INDEPENDENT = 1.1
"""Coherence up to which the tokens of a response are as good as independent."""
KAPPA_NEAR = (0.5, 1.5)
"""Values of kappa that count as near 1."""
ROUNDING = 1e-12
"""A smaller bias is the rounding of an exact 0."""
NO_ENTROPY = "Without the column entropy, a hidden temperature or top-p cannot be excluded."


def probability(p: float | None) -> str:
    """A p-value, such as "p 0.03", "p < 1e-99", or "undecided"."""
    if p is None:
        return "undecided"
    return "p < 1e-99" if p < 1e-99 else f"p {p:.1g}" if p < 0.01 else f"p {p:.2f}"


def support(verdict: Verdict) -> str:
    """What a verdict rests on, such as "p < 1e-99, 76 % of k3"."""
    parts = [] if verdict.p is None else [probability(verdict.p)]
    parts += [] if verdict.share is None else [f"{100 * verdict.share:.0f} % of k3"]
    return ", ".join(parts)


def price(evidence: Evidence, verdict: Verdict) -> str:
    """What mending the cause of a verdict would give, from its share of k3; empty where it has none."""
    before, part = evidence.whole.k3, verdict.share
    if verdict.level is Level.NUMERICS or not part or not before or not math.isfinite(before):
        return ""
    after = before * (1 - min(part, 1.0))
    return f"without it T* is {Growth.words(horizon(after))}"


def sentence(verdict: Verdict) -> str:
    """The sentence of a verdict with a capital and a full stop."""
    return f"{verdict.sentence[0].upper()}{verdict.sentence[1:]}."


def size(evidence: Evidence) -> str:
    """How much was read, such as "30,720 loss tokens, 192 responses, 1 step"."""
    steps = len(evidence.parts["step"]) or 1
    counted = f"{evidence.whole.tokens:,} loss tokens, {evidence.sequences:,} responses"
    return f"{counted}, {steps:,} step{'s' * (steps > 1)}"


def left_out(diagnosis: Diagnosis) -> str:
    """What was not read, without paths; empty if all was."""
    evidence, corrupt = diagnosis.evidence, diagnosis.corrupt
    parts = []
    if evidence.damaged:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in evidence.damaged.items())
        parts.append(f"responses with {kinds} log-probs (first: number {evidence.damaged_places[0]})")
    parts += [f"{corrupt.count:,} corrupt rows"] if corrupt.count else []
    parts += [f"{corrupt.files:,} damaged files"] if corrupt.files else []
    return f"Left out: {'; '.join(parts)}." if parts else ""


def named(column: str, part: Mapping[Any, Honesty], share: bool) -> dict[str, Honesty]:
    """The panels of a part by the text of their value; with ``share`` servers and tasks have a number alone."""
    hides = share and column in ("server", "task")
    return {f"{column} {i}" if hides else str(value): panel for i, (value, panel) in enumerate(part.items())}


def honesty_probability(evidence: Evidence, test: Test) -> str:
    """The p-value of a test of the honesty panel; undecided where the responses were chosen by outcome."""
    return probability(None if evidence.outcome_filter.filtered else evidence.adjusted.get(test.name))


def honesty_lines(evidence: Evidence, panel: Honesty) -> list[tuple[str, str, str, str]]:
    """(name, value, p-value, meaning) of each number of the honesty panel."""

    def p(test: Test | None) -> str:
        if test is None:
            return "not run"
        # in full in the JSON; here it would wrap the table
        return test.undecided.partition(":")[0] if test.p is None else honesty_probability(evidence, test)

    # the test has one side: a p-value of 1 would read as if something had been found
    above = p(panel.z_log_ratio) if panel.mean_log_ratio > 0 else "not above 0"
    surprise = "-" if panel.z_surprise is None else f"{panel.z_surprise.z:+.1f}"
    zeros = f"of the tokens; {panel.impossible_zeros:.2%} where the trainer gives less than one half"
    return [
        ("z_rho", f"{panel.z_ratio.z:+.1f}", p(panel.z_ratio), _mean_ratio(evidence, panel)),
        ("z_W", surprise, p(panel.z_surprise), _surprise(panel)),
        ("mean l", f"{panel.mean_log_ratio:+.1e}", above, "nats; above 0 is impossible for honest logs"),
        ("kappa", "-" if not panel.k3 else f"{panel.kappa:.2f} +- {panel.kappa_error:.2f}", "", _kappa(panel)),
        ("log mu = 0", f"{panel.exact_zeros:.2%}", "", zeros),
        ("equal", f"{panel.exact:.2%}", "", "of the tokens have both log-probs equal bit for bit"),
    ]


def size_lines(evidence: Evidence) -> list[tuple[str, str]]:
    """(name, text) of each number that says how large the gap is."""
    whole, growth = evidence.whole, evidence.growth
    if not whole.k3:
        return [("k3", "0: both lists are equal at every token")]
    tail = evidence.token_tail.k, evidence.sequence_tail.k
    trusted = ": weights of whole sequences cannot be trusted" if tail[1] > LIMIT else ", below the limit of 0.7"
    return [
        ("k3", f"{whole.k3:.2e} nats per token"),
        ("sigma", f"{whole.sigma:.3f}: the noise of every logit that would give this gap"),
        ("T*", f"{growth.reach}: for longer responses, whole-sequence weights are mostly noise"),
        ("ESS", f"{growth.ess:.0%} of the sequences; {growth.ess_predicted:.0%} expected at this k3 and these lengths"),
        ("k-hat", f"{number(tail[0])} of tokens; {number(tail[1])} of sequences{trusted}"),
        (
            "growth",
            f"sd of the sum of l grows as t^{number(growth.exponent)} ({_kind(growth)}); its "
            f"variance is {number(growth.coherence)} times that of independent tokens",
        ),
        *_grids(evidence),
        *([("mixed", mixture)] if (mixture := _mixture(evidence)) else []),
        *([("one token", worst)] if (worst := _one_token(evidence)) else []),
    ]


def _kind(growth: Growth) -> str:
    if growth.exponent >= OFFSET and growth.coherence <= INDEPENDENT:
        return "only because later tokens are noisier"
    return "0.5 noise, 1 an offset, 0 a transient"


def _grids(evidence: Evidence) -> list[tuple[str, str]]:
    """What rounding of the sampler's logs and logits makes of the gap, where they lie on a grid."""
    lines = []
    if found := grid(evidence.sample):
        lines.append(("log mu", f"has {found.name}; the rounding makes {found.share:.1%} of mean l^2"))
    if found := logit_grid(evidence.sample):
        steps = f"the sampler's have steps of {found.name}, as in 16 bits; the rounding makes at least"
        lines.append(("logits", f"{steps} {found.share:.1%} of mean l^2"))
    return lines


def _mixture(evidence: Evidence) -> str:
    """That the dump holds several tasks or temperatures, and how far apart they are; empty if it does not."""
    parts = {column: [panel.k3 for panel in evidence.parts[column].values()] for column in ("task", "temperature")}
    said = {name: f"{len(k3)} {name}s, k3 {min(k3):.1e} to {max(k3):.1e}" for name, k3 in parts.items() if len(k3) > 1}
    return f"{'; '.join(said.values())}; --only {next(iter(said))}=VALUE judges one alone" if said else ""


def _one_token(evidence: Evidence) -> str:
    """Where the token is that carries most of the gap alone; empty if none does."""
    chunk = evidence.sample
    worst = int(chunk.k3.argmax())
    if not chunk.k3[worst] > ONE_TOKEN * chunk.k3.sum():
        return ""
    sequence = int(chunk.sequence_of[worst])
    names = [f"{name} {chunk.sequences[name][sequence]}" for name in ("step", "group") if name in chunk.sequences]
    place = ", ".join([*names, f"position {chunk.tokens['position'][worst]}"])
    return f"{chunk.k3[worst] / chunk.k3.sum():.0%} of k3 at {place}: log pi {chunk.log_pi[worst]:.3g}, log mu " + (
        f"{chunk.log_mu[worst]:.3g}"
    )


def factor_lines(evidence: Evidence) -> list[tuple[str, float, str, int]]:
    """(title, share of the variance of |l|, p-value, values) of each factor: significant ones first, then the one
    that explains most."""
    lines = []
    tests = evidence.factor_tests

    def order(item: tuple[str, Profile]) -> tuple[bool, float]:
        return not evidence.significant(tests.get(item[0])), -item[1].explained

    for name, profile in sorted(evidence.profiles.items(), key=order):
        test = tests.get(name)
        p = probability(evidence.adjusted.get(test.name)) if test else "one value"
        lines.append((profile.factor.title, profile.explained, p, len(profile.bins)))
    return lines


def what_if_cells(row: WhatIf) -> tuple[str, ...]:
    """Shares that a method keeps (tokens, answers, quarters by length, correct answers), ESS, bias, cosine, drift."""
    return (
        percent(row.kept_tokens),
        percent(row.kept_sequences),
        " ".join(percent(kept.sequences) for kept in row.by_length),
        "-" if row.by_correct is None else percent(row.by_correct["correct"].sequences),
        percent(row.ess),
        "0" if row.bias < ROUNDING else f"{row.bias:.1e}",
        "-" if row.cosine is None else f"{row.cosine:.3f}",
        "-" if row.drift_left is None else f"{row.drift_left:.1e}",
    )


def what_if_gaps(table: WhatIfTable, *, with_signs: bool) -> str:
    """Why cells of the table of corrections hold a dash, if any do; ``with_signs``: it has columns by advantage."""
    rows, reasons = table.rows, []
    by_correct = rows[0].by_correct if rows else None
    if rows and by_correct is None:
        reasons.append("right needs the column reward")
    elif by_correct is not None and math.isnan(by_correct["correct"].tokens):
        reasons.append("no answer is right (reward above 0)")
    if with_signs and rows and rows[0].by_sign is None:
        reasons.append("+ - and lost need the column advantage")
    if rows and any(math.isnan(kept.tokens) for kept in rows[0].by_length):
        reasons.append("equal lengths leave a quarter by length empty")
    if rows and all(row.cosine is None for row in rows):
        reasons.append("the cosine needs responses shorter than T* with half of the tokens")
    if rows and all(row.drift_left is None for row in rows):
        reasons.append("drift needs the column top_old_logprobs")
    return f"A dash: {'; '.join(reasons)}." if reasons else ""


def accepted(diagnosis: Diagnosis, share: bool) -> list[str]:
    """One sentence for each finding that was accepted, and for each whose acceptance has ended."""
    entries, found = diagnosis.evidence.known.accepted, {each.code: each for each in diagnosis.judgement.accepted}
    counted = {verdict.code for verdict in diagnosis.verdicts}
    lines = []
    for each in entries:
        if each.code in (found if each.holds else counted):
            why = "" if share else f" ({each.reason})"
            said = f": {found[each.code].sentence}" if each.holds and not share else ""
            lines.append(f"{each.code} {each.state}{why}{said}")
    return lines


DRIFT_HEAD = ("first tokens", "responses", "tv", "lemma B.5", "bias", "theorem B.1")


def drift_sentence(drift: Drift) -> str:
    """The distances of a token's two distributions."""
    return (
        f"Of a token: total variation {drift.tv:.2g} on average and somewhere at least {drift.largest_tv:.2g} "
        f"(Delta_max), which bound the bias; chi2 {drift.chi2:.2g}, which is the variance of its ratio."
    )


def drift_cells(row: AtLength) -> tuple[str, ...]:
    """One row below DRIFT_HEAD."""
    numbers = (row.length, row.sequences, row.tv, row.tv_bound, row.bias, row.bias_bound)
    return tuple(f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in numbers)


def percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f}"


def course(diagnosis: Diagnosis) -> str:
    """One sentence on a run of several steps, such as "k3 grew 3.1x from steps 0-24 to 75-99: engine 80 %, ..."."""
    if (line := diagnosis.timeline) is None:
        return ""
    parts = [change] if (change := growth(diagnosis)) else []
    if line.jumps:
        parts.append(f"jump{'s' * (len(line.jumps) > 1)} at step {', '.join(str(jump.step) for jump in line.jumps)}")
    if line.drift is not None:
        parts.append(f"a steady drift of {100 * (line.drift - 1):+.1f} % per step")
    for pair in line.lead_lag:
        if pair.p < SERIES_LEVEL:
            when = f"{abs(pair.lag)} steps {'after' if pair.lag > 0 else 'before'}" if pair.lag else "together with"
            parts.append(f"{pair.other.replace('_', ' ')} moves {when} k3 (r {pair.correlation:+.2f})")
    if line.surge.step is not None:
        parts.append(f"responses surge from step {line.surge.step}")
    return "; ".join(parts)


def growth(diagnosis: Diagnosis) -> str:
    """Whether k3 changed between the first and last steps, and why, without a capital and a full stop."""
    if (found := diagnosis.decomposition) is None:
        return ""
    before, after = (steps_of(side.first_step, side.last_step) for side in (found.before, found.after))
    if not found.changed:
        return f"k3 did not change from {before} to {after} ({found.factor:.2f}x, within its error)"
    verb, factor = ("grew", found.factor) if found.factor > 1 else ("shrank", 1 / found.factor)
    why = ", ".join(
        f"{part.name} {round(100 * part.share)} +- {round(100 * (part.share_error or 0))} %"
        for part in found.parts
        if part.share is not None
    )
    if diagnosis.lagged:
        why = "older weights sampled, which changes all of its parts"
    return f"k3 {verb} {factor:.2g}x from {before} to {after}: {why}"


def steps_of(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _mean_ratio(evidence: Evidence, panel: Honesty) -> str:
    text = f"mean ratio {panel.mean_ratio:.5f}"
    if evidence.outcome_filter.filtered:
        return f"{text}; a filter by outcome moves it, too"
    if not evidence.significant(panel.z_ratio):
        return f"{text}: 1 within its error, as honest logs give"
    if abs(panel.mean_ratio - 1) < RATIO_FLOOR:
        return f"{text}: 1 within the rounding of log-probs"
    return (
        f"{text}: {'some of pi cannot be drawn' if panel.mean_ratio < 1 else 'above 1 is impossible for honest logs'}"
    )


def _kappa(panel: Honesty) -> str:
    if not panel.k3:
        return "no gap: both lists are equal"
    if not panel.kappa_counts:
        return "too uncertain at so small a gap to say anything"
    if abs(panel.mean_log_ratio) < RATIO_FLOOR:
        return "the mean of l is within the rounding of log-probs, and kappa says nothing"
    near = KAPPA_NEAR[0] <= panel.kappa <= KAPPA_NEAR[1]
    return "near 1, as a small honest mismatch gives" if near else "far from 1: not a small honest mismatch"


def _surprise(panel: Honesty) -> str:
    if panel.surprise is None:
        return "needs the column entropy"
    side = "less" if panel.surprise < 0 else "more"
    return f"tokens are {abs(panel.surprise):.3f} nats {side} surprising than the trainer's entropy"
