"""The sums of docs/real.md: their formulas, and that page and results agree."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rc.files import read_csv
from real import atlas, page
from real.prompts import KINDS, TOPICS, rows
from real.sums import RESULTS, Response, figures, interval, row_of

FILES = {file: json.loads((RESULTS / f"{file}.json").read_text()) for file in ("gap", "gap_cuda", "gap_sglang")}
FOUND = {(file, name): row for file, found in FILES.items() for name, row in found.items()}


def drawn(sigma: float, responses: int = 400, length: int = 80) -> list[Response]:
    """Responses whose sampler is the trainer with noise on the log-odds of every token, drawn by the sampler."""
    rng = np.random.default_rng(0)
    out = []
    for number in range(responses):
        odds = rng.normal(0, 2, length)
        eps = rng.normal(0, sigma, length)
        pi, mu = -np.log1p(np.exp(-odds)), -np.log1p(np.exp(eps - odds))
        keep = rng.random(length) < np.exp(mu)
        out.append(Response(prompt=(number % 40,), pi=pi[keep], mu=mu[keep]))
    return out


def test_noise_on_logits_is_found_by_sigma_by_eps_at_every_confidence_and_by_k3() -> None:
    row = row_of(drawn(0.1), {(0,): "story"})
    found = figures(row["prompts"])
    assert found["sigma"] == pytest.approx(0.1, rel=0.03)
    for one in row["bins"]:
        if one["tokens"] > 200:
            assert one["mad"] == pytest.approx(0.1 * np.sqrt(2 / np.pi), rel=0.12)
            assert (one["q05"], one["q95"]) == pytest.approx((-0.164, 0.164), abs=0.03)
    assert row["kurtosis"] == pytest.approx(3, abs=0.2)
    low, high = interval(row["prompts"], "k3", 200)
    assert low < found["k3"] < high < 1.2 * low
    assert sum(one["tokens"] for one in row["positions"]) == row["tokens"] == found["tokens"]
    assert [one["kind"] for one in row["prompts"]].count("story") == 1


def test_there_are_eight_kinds_of_twelve_topics_all_different() -> None:
    texts = [row["prompt"] for row in rows()]
    assert len(set(texts)) == len(texts) == len(KINDS) * len(TOPICS) == 96


@pytest.mark.parametrize("name", FOUND, ids="/".join)
def test_a_committed_row_is_whole_and_agrees_with_itself(name: tuple[str, str]) -> None:
    row = FOUND[name]
    assert row["tokens"] == sum(one["tokens"] for one in row["prompts"]) >= 10_000  # a model in 4 bits ends early
    seeds = [each["tokens"] for (file, cell), each in FOUND.items() if (file, cell[:-1]) == (name[0], name[1][:-1])]
    assert name[0] != "gap" or sum(seeds) >= 50_000
    assert figures(row["positions"])["k3"] == pytest.approx(figures(row["prompts"])["k3"], rel=1e-9)
    assert sum(one["tokens"] for one in row["bins"]) + row["certain"] == row["tokens"]
    for weights in row["sequence weights"].values():
        w = np.exp(weights["sums"])
        assert weights["ess"] == pytest.approx(w.sum() ** 2 / len(w) / (w**2).sum(), rel=1e-3)


def test_what_the_page_says_of_a_gpu_follows_from_the_sums() -> None:
    cpu, cuda = page.rows(), page.rows("gap_cuda.json")
    for name, row in cuda.items():
        sigmas = [figures([place])["sigma"] for place in row["positions"]]
        assert min(sigmas) == sigmas[-1]
        if name != "fp32":
            assert 0.75 < figures(row["prompts"])["k3"] / figures(cpu[name]["prompts"])["k3"] < 1.25


def test_a_real_server_in_16_bits_has_the_gap_that_the_engine_emulates() -> None:
    emulated, served = page.rows(), page.rows("gap_sglang.json")
    assert set(served) == {"fp32", "bf16", "bf16-batch-16", "bf16-batch-4", "fp16"}
    for name in set(served) - {"fp32"}:
        expected = figures(emulated[name.partition("-")[0]]["prompts"])["k3"]
        assert 0.85 < figures(served[name]["prompts"])["k3"] / expected < 1.15


def test_the_page_is_that_of_the_committed_sums() -> None:
    assert page.page(page.rows()) == (Path(page.DOCS) / "real.md").read_text()


def test_the_atlas_has_our_rows_as_the_sums_give_them_and_quotes_every_other_one() -> None:
    found = read_csv(atlas.Row, atlas.FILE)
    ours = [row for row in found if row.source == atlas.OURS]
    for row, expected in zip(ours, atlas.own(), strict=True):
        assert row[:6] == expected[:6]
        assert row[6:9] == pytest.approx(expected[6:9], rel=1e-4)
    others = [row for row in found if row.source != atlas.OURS]
    assert len(others) >= 25 and len({atlas.name_of(row.source).partition(" ")[0] for row in others}) >= 9
    assert all(row.source.startswith("https://") and row.quote for row in others)
    assert {row.statistic for row in found} <= set(atlas.STATISTICS)
    assert atlas.page(found) == (Path(page.DOCS) / "atlas.md").read_text()
