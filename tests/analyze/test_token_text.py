"""The worst tokens as text: which ones, in which context, and never where text must stay at home."""

from pathlib import Path

import numpy as np
import pytest
from refusals import run
from simulated_dumps import write_dump

from megatron_rc.analyze.chunk import Chunk

LENGTH, RESPONSES = 24, 40
WORST = 17


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose ids are words, and a dump in which word 17 of response 3 is much less likely to the trainer."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(LENGTH)} | {"\x1b[31m": LENGTH, "?": LENGTH + 1}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    random, size = np.random.default_rng(1), RESPONSES * LENGTH
    log_pi = np.log(random.uniform(0.2, 0.9, size))
    log_mu = np.minimum(log_pi + 0.01 * random.standard_normal(size), 0)
    log_mu[3 * LENGTH + WORST], log_pi[3 * LENGTH + WORST] = np.log(0.5), np.log(0.01)
    ids = np.tile(np.arange(LENGTH), RESPONSES)
    ids[3 * LENGTH + WORST - 1] = LENGTH
    chunk = Chunk(
        log_pi, log_mu, np.arange(RESPONSES + 1) * LENGTH, {"token_id": ids}, {"step": np.zeros(RESPONSES, int)}
    )
    write_dump(chunk, tmp_path / "dump.parquet")
    return tmp_path


def test_terminal_and_page_show_the_worst_token_in_its_response_with_both_probabilities(folder: Path) -> None:
    ended = run("analyze", folder / "dump.parquet", "--tokenizer", folder, "--html", folder / "page.html")
    said = " ".join(ended.stdout.split())
    assert ended.status == 0 and "0.5 sampled, 0.01 trained: w1 w2" in said, ended
    context = f"w15 �[31m⟦w{WORST}⟧w18 w19 w20 w21"
    assert context in said and context in (folder / "page.html").read_text()


def test_text_is_never_shared_and_needs_ids(folder: Path) -> None:
    given = ("--tokenizer", folder / "tokenizer.json", "--no-html")
    assert run("analyze", folder / "dump.parquet", *given, "--share").is_refusal("which --share leaves out")
    rows = np.full((4, 5), -1.0)
    bare = Chunk(rows.reshape(-1), rows.reshape(-1), np.arange(5) * 5, {}, {"step": np.zeros(4, int)})
    write_dump(bare, folder / "bare.parquet")
    assert run("analyze", folder / "bare.parquet", *given).is_refusal("needs the column token_id")
