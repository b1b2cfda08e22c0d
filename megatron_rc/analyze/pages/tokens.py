"""The tokens with the largest log-ratios, in context."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.pages.card import Cell, card, table
from megatron_rc.analyze.token_text import Decode, in_context, worst_tokens

TOP = 20
"""Tokens that are shown."""
BEFORE, AFTER = 3, 2
"""Neighbours whose ids are shown."""


def top_tokens(evidence: Evidence, share: bool, decode: Decode | None = None) -> str:
    """A row per token; under ``share`` without ids and names, with ``decode`` as text."""
    sample = evidence.sample
    ids = "token_id" in sample.tokens and not share
    server = "server" in sample.sequences and not share
    head = ["", "step", "place", "l", "log mu", "log pi", "l before", "l after", *["server"] * server]
    head += ["text" if decode else "ids"] * ids
    rows: list[list[str | Cell]] = []
    for rank, token in enumerate(worst_tokens(evidence, TOP), start=1):
        sequence = int(sample.sequence_of[token])
        step = str(sample.sequences["step"][sequence]) if "step" in sample.sequences else ""
        start, end = (int(i) for i in sample.cu_seqlens[sequence : sequence + 2])
        row: list[str | Cell] = [str(rank), step, f"{token - start + 1:,} of {end - start:,}"]
        row += [f"{sample.log_ratio[token]:+.3f}", f"{sample.log_mu[token]:.4g}", f"{sample.log_pi[token]:.4g}"]
        row += [f"{sample.log_ratio[i]:+.3f}" if start <= i < end else "-" for i in (token - 1, token + 1)]
        row += [str(sample.sequences["server"][sequence])] if server else []
        if ids and decode:
            row.append(Cell("".join(in_context(evidence, token, decode)), "words"))
        elif ids:
            near, names = range(max(start, token - BEFORE), min(end, token + AFTER + 1)), sample.tokens["token_id"]
            row.append(" ".join(f"[{names[i]}]" if i == token else str(names[i]) for i in near))
        rows.append(row)
    return card(
        "Tokens of the largest |l|",
        table(rows, head=head),
        "Where the two sides differ most, with the log-ratios of the tokens before and after. Look for what they "
        "share: one id, one place, one server, or neighbours that are off as well.",
        "rare tokens (log mu of -2 and below) at scattered places, with calm neighbours.",
    )
