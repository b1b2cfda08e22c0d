"""analysis.html: the diagnosis of a dump in one file that needs no network."""

import base64
import datetime
import hashlib
from html import escape
from pathlib import Path

from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.pages import answers, bounds, by_bin, confidence, sequences, steps, tokens
from megatron_rc.analyze.pages.card import STYLE
from megatron_rc.analyze.readers.format import OWN_PAGE
from megatron_rc.analyze.token_text import Decode
from megatron_rc.drawing.frame import SCRIPT, document
from megatron_rc.versions import installed_version

_BEGINNING = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">' + OWN_PAGE
"""Every page begins like this; a file that does not is never overwritten."""


def write(
    diagnosis: Diagnosis,
    path: str | Path,
    *,
    share: bool = False,
    what_if: bool = False,
    decode: Decode | None = None,
    command: str = "",
) -> Path:
    """Write the page of a diagnosis to a file, which may hold an earlier page; returns the path.

    Args:
        share: leave out what may name people, machines or text: path, names of servers, finish reasons, ids.
        what_if: also compute what each correction would do, which takes seconds and torch.
        decode: text of token ids; the worst tokens are shown as text.
        command: what made the page, for its last line.

    Raises ValueError where the file cannot be written, or is not a page of an analysis.
    """
    path = Path(path)
    refuse_foreign(path)
    version = installed_version("megatron-rc") or "of a folder that is not installed"
    made = f"megatron-rc {version}, {datetime.date.today()}"
    footer = f"<footer>{made}{f': <code>{escape(command)}</code>' if command else ''}</footer>"
    path.write_text(page(diagnosis, share=share, what_if=what_if, decode=decode, footer=footer), encoding="utf-8")
    return path


def refuse_foreign(path: Path) -> None:
    """Raise ValueError where a page cannot be written: no folder, or a file that no analysis wrote."""
    if not path.parent.is_dir():
        raise ValueError(f"--html: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"--html: {path} is a folder; give a file such as {path / 'analysis.html'}")
    if not path.exists():
        return
    beginning = _BEGINNING.encode()
    with path.open("rb") as file:
        if file.read(len(beginning)) != beginning:
            raise ValueError(f"--html: {path} exists and is not the page of an analysis; give another file")


def page(
    diagnosis: Diagnosis,
    *,
    share: bool = False,
    what_if: bool = False,
    decode: Decode | None = None,
    footer: str = "",
) -> str:
    """The page as text; the same diagnosis and footer give the same bytes."""
    evidence = diagnosis.evidence
    charts = [
        by_bin.likelihood_map(diagnosis),
        by_bin.by_log_mu(evidence),
        confidence.by_confidence(evidence),
        by_bin.by_position(evidence),
        by_bin.by_position(evidence, "turn_start", "By tokens since the turn began"),
        sequences.running_sums(evidence),
        steps.servers(evidence, share),
        by_bin.by_lag(evidence),
        sequences.rank_size(evidence),
        sequences.effective_size(evidence),
        bounds.error_of_bound(diagnosis),
        steps.over_steps(diagnosis),
        steps.split(diagnosis),
    ]
    tables = [
        by_bin.who_explains(evidence),
        tokens.top_tokens(evidence, share, decode),
        answers.what_if(diagnosis, what_if),
        answers.not_judged(diagnosis, share),
    ]
    told = [answers.verdicts(diagnosis, share), answers.honesty(evidence, share), answers.gap(evidence)]
    return document(
        "Rollout analysis" if share else f"{answers.name_of(diagnosis)}: rollout analysis",
        f'{answers.header(diagnosis, share)}<section class="stack">{"".join(told)}</section>'
        f'<section class="panels">{"".join(charts)}</section>'
        f'<section class="stack">{"".join(tables)}</section>{footer}',
        head=OWN_PAGE + _policy(),
        style=STYLE,
    )


def framed(diagnosis: Diagnosis) -> str:
    """The page in a frame, for a cell of a notebook, which its style sheet would change without one."""
    style = "width: 100%; height: 80vh; border: 0"
    return f'<iframe title="Rollout analysis" style="{style}" srcdoc="{escape(page(diagnosis))}"></iframe>'


def _policy() -> str:
    """A policy by which the browser loads nothing and runs only our script, even if a string is not escaped."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    allowed = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
