"""The tokens where the two sides differ most, as text: what stands before and behind them, with both probabilities."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_rc.analyze.evidence import Evidence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids."""

BEFORE, AFTER = 16, 4
"""Neighbours in the response whose text is shown."""


def read_tokenizer(path: Path) -> Decode:
    """Decode with a ``tokenizer.json``, or the one in a folder; ValueError where there is none or it cannot be read."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer: {file} does not exist; a Hugging Face folder with a fast tokenizer has it")
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except ModuleNotFoundError:
        raise ValueError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    except Exception as error:  # the package raises nothing more specific
        raise ValueError(f"--tokenizer: {file} is no tokenizer ({error})") from None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def worst_tokens(evidence: Evidence, top: int) -> list[int]:
    """Indices in the sample of the ``top`` tokens with the largest |l|, the worst first."""
    return np.argsort(-np.abs(evidence.sample.log_ratio), kind="stable")[:top].tolist()


def in_context(evidence: Evidence, token: int, decode: Decode) -> tuple[str, str, str]:
    """The text of a token's response before it, its own in ⟦⟧, and that behind it."""
    sample = evidence.sample
    start, end = sample.cu_seqlens[sample.sequence_of[token] :][:2]
    ids = sample.tokens["token_id"]
    near = (
        ids[max(start, token - BEFORE) : token],
        ids[token : token + 1],
        ids[token + 1 : min(end, token + 1 + AFTER)],
    )
    before, own, after = (_printable(decode(part.tolist())) for part in near)
    return before, f"⟦{own}⟧", after


def _printable(text: str) -> str:
    """With ⏎ for the end of a line, and � for what would move the cursor or change colours."""
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else "�" for c in text)


def probabilities(evidence: Evidence, token: int) -> str:
    """Both probabilities of a token, the sampler's first."""
    mu, pi = (math.exp(side[token]) for side in (evidence.sample.log_mu, evidence.sample.log_pi))
    return f"{mu:.2g} sampled, {pi:.2g} trained"
