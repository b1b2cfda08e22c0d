"""The parts of a page that are text: verdicts, the honesty panel, what was not judged."""

from collections.abc import Mapping, Sequence
from html import escape

from megatron_rc.analyze import report_text
from megatron_rc.analyze.columns import meaning
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.headline import excluded, headline
from megatron_rc.analyze.pages.card import Cell, card, table
from megatron_rc.analyze.rules.rule import DOUBTS, Level, Page, Verdict
from megatron_rc.analyze.statistics.honesty import Honesty
from megatron_rc.analyze.statistics.significance import Test
from megatron_rc.analyze.statistics.what_if import Missing, WhatIf
from megatron_rc.drawing.frame import folded, without_folder

MOST_PANELS = 64
"""Rows of the honesty panel by step or by server; where there are more, those with the largest |z| are shown."""

FIX_TITLES = {
    Level.LAG: "What now: accept it, correct for it, or lower the lag, by codebase",
    Level.NUMERICS: "To shrink the gap, by codebase",
}
"""Titles of the fixes where nothing is broken."""
METHOD_HEAD = ("method", "tokens", "answers", "by length", "right", "+ -", "lost", "ESS", "bias", "cosine", "drift", "")


def name_of(diagnosis: Diagnosis) -> str:
    """What was judged, without folders of this machine."""
    return " ".join([without_folder(diagnosis.source), *diagnosis.only])


def header(diagnosis: Diagnosis, share: bool) -> str:
    """The answer as heading, what to do, warnings that limit what the page can say, and the size of the dump."""
    evidence, advice = diagnosis.evidence, diagnosis.recommendation
    name = "A rollout dump" if share else name_of(diagnosis)
    warning = f'<p class="warning">{report_text.NO_ENTROPY}</p>' if diagnosis.hidden_sampling_possible else ""
    filtered = evidence.outcome_filter.sentence
    warning += f'<p class="warning">{escape(filtered)}</p>' if filtered else ""
    sampled = f"{evidence.sample.log_pi.size:,} tokens of {evidence.sample.num_sequences:,} whole responses"
    return (
        f'<header><h1 class="level {diagnosis.level.lower()}">{escape(headline(diagnosis))}</h1>'
        f'<p class="advice"><b>{escape(advice.headline)}</b> {escape(advice.reason)}</p>{warning}'
        f"<p>{escape(name)} ({escape(diagnosis.format)}): {report_text.size(evidence)}. Sums are over all of "
        f"them; permutations, running sums and single tokens over a sample of {sampled}.</p></header>"
    )


def verdicts(diagnosis: Diagnosis, share: bool) -> str:
    """A card per verdict, and what a report without a bug excludes."""
    cards = "".join(_verdict(diagnosis.evidence, verdict, share) for verdict in diagnosis.verdicts)
    return cards + (f"<p>{escape(said)}</p>" if (said := excluded(diagnosis)) else "")


def _verdict(evidence: Evidence, verdict: Verdict, share: bool) -> str:
    page, support = verdict.page, report_text.support(verdict)
    small = ", ".join(filter(None, [verdict.level, support, report_text.price(evidence, verdict)]))
    parts = [f"<h2><b>{verdict.code}</b> {escape(page.title)} <small>{escape(small)}</small></h2>"]
    if not share:
        # a sentence may name servers, ids and finish reasons
        parts.append(f"<p>{escape(report_text.sentence(verdict))}</p>")
    if verdict.one_of:
        parts.append(f"<p>These data do not separate {escape(' from '.join(verdict.one_of))}.</p>")
    fixes = table([(host, Cell(fix, "words")) for host, fix in page.fixes.items()], stacked=True)
    parts.append(
        folded(FIX_TITLES.get(verdict.level, "Fix, by codebase"), fixes, opened=verdict.level != Level.NUMERICS)
    )
    if verdict.level in DOUBTS:
        look_alikes = "".join(
            f"<p>{escape(part)}</p>" for part in page.section("What else looks like this").split("\n\n")
        )
        parts.append(f"<p><b>Decide:</b> {escape(page.experiment)}</p>")
        parts.append(folded("What else looks like this", look_alikes))
    numbers = table([(name, f"{value:.6g}") for name, value in verdict.numbers.items()])
    parts.append(folded("Numbers", numbers))
    return f'<article class="verdict {verdict.level.lower()}">{"".join(parts)}</article>'


def honesty(evidence: Evidence, share: bool) -> str:
    """The honesty panel of the dump; those by step, server, task and temperature are folded."""
    lines = report_text.honesty_lines(evidence, evidence.whole)
    inside = table(((name, value, p, Cell(text, "words")) for name, value, p, text in lines), stacked=True)
    for column, part in evidence.parts.items():
        if len(part) > 1:
            inside += folded(f"By {column}", _panels(evidence, column, report_text.named(column, part, share)))
    return card(
        "Honesty",
        inside,
        "These numbers say whether the logged distribution is the one that drew the tokens; the p-values are corrected "
        "for the number of tests in this report.",
        "z_rho and z_W within 4, kappa near 1, mean l below 0, no log-prob of exactly 0 that the trainer doubts.",
    )


def _panels(evidence: Evidence, title: str, panels: Mapping[str, Honesty]) -> str:
    def largest(panel: Honesty) -> float:
        return max(abs(test.z) for test in panel.tests)

    def shown(test: Test | None) -> str:
        return f"{test.z:+.1f} ({report_text.honesty_probability(evidence, test)})" if test else "-"

    kept = set(sorted(panels, key=lambda name: -largest(panels[name]))[:MOST_PANELS])
    rows = []
    for name, panel in panels.items():
        if name in kept:
            numbers = f"{panel.tokens:,}", f"{panel.k3:.2e}", f"{panel.mean_ratio:.5f}"
            rows.append((name, *numbers, shown(panel.z_ratio), shown(panel.z_surprise)))
    return table(rows, head=(title, "tokens", "k3", "mean ratio", "z_rho", "z_W"))


def gap(evidence: Evidence) -> str:
    """The numbers that say how large the gap is."""
    inside = table(((name, Cell(text, "words")) for name, text in report_text.size_lines(evidence)), stacked=True)
    return card(
        "How large the gap is",
        inside,
        "Six numbers to compare with those of other runs; sigma does not depend on entropy or length.",
        "T* above the length of the responses, k-hat below 0.7, growth near 0.5.",
    )


def what_if(diagnosis: Diagnosis, computed: bool) -> str:
    """The recommended correction, and the table of all of them if ``computed``; without torch, a sentence instead."""
    advice = diagnosis.recommendation
    shown = diagnosis.what_if if computed else Missing("The table of all corrections needs torch: --what-if adds it.")
    text = f"<p><em>{escape(advice.headline)}</em> {escape(advice.reason)}</p>"
    title = "What a correction would do"
    if isinstance(shown, Missing):
        return card(title, f"{text}<p>{escape(shown.sentence)}</p>")
    rows = [_method(row) for row in sorted(shown.rows, key=lambda row: row.name != advice.method)]
    skipped = "".join(
        f"<p>Not computed: {name} needs {escape(', '.join(columns))}.</p>" for name, columns in shown.not_run.items()
    )
    gaps = f"<p>{escape(reason)}</p>" if (reason := report_text.what_if_gaps(shown, with_signs=True)) else ""
    drift = f"<p>What weights of tokens leave. {report_text.drift_sentence(shown.drift)}</p>" + table(
        [list(report_text.drift_cells(at)) for at in shown.drift.by_length], head=report_text.DRIFT_HEAD
    )
    return card(
        title,
        text + table(rows, head=METHOD_HEAD) + gaps + skipped + drift,
        f"Every correction on {shown.tokens:,} tokens of this dump: percent kept of the tokens, of the answers, of "
        "each quarter of the answers by length (the shortest first), of correct answers, and of tokens with positive "
        "and negative advantage; percent of the advantages that is lost; effective percent of the tokens; bias of the "
        "weights; cosine with the exact weights of sequences; norm of the drift that weights of tokens leave. Red: "
        "drops more than 20 % of the correct answers, or more than half of a quarter by length. The last table: total "
        "variation of the first tokens of a response, and the largest bias of weights of tokens, in units of the "
        "largest advantage, each beside its bound.",
        "a method that keeps nearly all answers of every length, with a high ESS and a cosine near 1.",
    )


def _method(row: WhatIf) -> list[str | Cell]:
    tokens, answers, lengths, right, *numbers = report_text.what_if_cells(row)
    signs = "-" if row.by_sign is None else " ".join(report_text.percent(kept.tokens) for kept in row.by_sign.values())
    lost = "-" if row.advantage_removed is None else report_text.percent(row.advantage_removed)
    warnings = Cell("; ".join(row.warnings), "words red" if row.warnings else "words")
    return [row.name, tokens, answers, lengths, right, signs, lost, *numbers, warnings]


def not_judged(diagnosis: Diagnosis, share: bool) -> str:
    """The rules that were not run or not judged, and what was left out."""
    judgement, parts = diagnosis.judgement, []
    if judgement.not_run:
        needed = {
            code: "; ".join(f"{name} ({meaning(name)})" for name in names) for code, names in judgement.not_run.items()
        }
        parts.append(_rules(needed, ("not run", "rule", "columns that are missing")))
    if judgement.not_judged:
        bugs = judgement.not_judged.items()
        why = {code: f"{bug} changes what it reads and must be fixed first" for code, bug in bugs}
        parts.append(_rules(why, ("not judged", "rule", "why")))
    parts += [f"<p>{escape(line)}</p>" for line in report_text.accepted(diagnosis, share)]
    if reason := diagnosis.evidence.outcome_filter.not_run:
        parts.append(f"<p>Not checked whether responses were filtered by outcome: {escape(reason)}.</p>")
    if not share:
        # these sentences name files
        told = (*diagnosis.corrupt.first, *diagnosis.ignored)
        parts += [f"<p>{escape(each.replace(diagnosis.source, without_folder(diagnosis.source)))}</p>" for each in told]
    return card(
        "Rules that said nothing, because they could not",
        "".join(parts),
        report_text.left_out(diagnosis) or "No response was left out.",
        "nothing is listed here: a rule that was not run has excluded nothing.",
    )


def _rules(why: Mapping[str, str], head: Sequence[str]) -> str:
    rows = [(code, Cell(Page(code).title, "name"), Cell(text, "words")) for code, text in why.items()]
    return table(rows, head=head)
