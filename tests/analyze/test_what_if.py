"""What each correction would do to a dump: against `correct` itself, and against sums over every response."""

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from enumeration import VOCABULARY, World
from rich.console import Console
from simulated_dumps import diagnosed, evidence_of, policy_lag, world

from megatron_rc import Extras, correct
from megatron_rc.analyze import diagnose, terminal
from megatron_rc.analyze.chunk import Chunk, Floats
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.statistics.drift import Drift
from megatron_rc.analyze.statistics.residual import top_of
from megatron_rc.analyze.statistics.what_if import Kept, Missing, WhatIf, WhatIfTable, what_if
from megatron_rc.correction.settings import PRESETS, Rejection, RolloutCorrection, Weight
from megatron_rc.versions import installing

LENGTH = 3


def table_of(evidence: Evidence, **methods: RolloutCorrection) -> WhatIfTable:
    every = methods or {name: preset.correction for name, preset in PRESETS.items()}
    table = what_if(evidence.sample, evidence.growth.horizon, every)
    assert isinstance(table, WhatIfTable)
    return table


def row(table: WhatIfTable, name: str) -> WhatIf:
    return next(row for row in table.rows if row.name == name)


def responses(seed: int = 1, noise: float = 0.3, sequences: int = 60, **columns: np.ndarray) -> Chunk:
    """Responses of 1 to 59 tokens with every column that a method may need."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 60, sequences)
    tokens = int(lengths.sum())
    log_mu = -random.exponential(1, tokens)
    reward = random.integers(0, 2, sequences).astype(float)
    return Chunk(
        np.minimum(log_mu + noise * random.normal(size=tokens), 0),
        log_mu,
        np.concatenate([[0], np.cumsum(lengths)]),
        {"turn": np.arange(tokens) // 7},
        {"reward": reward, "advantage": reward - 0.5} | columns,
    )


def corrected(chunk: Chunk, method: RolloutCorrection, lags: Floats | None = None) -> tuple[Floats, np.ndarray]:
    """Weights and mask of `correct` on the padded layout, flattened again."""
    place = np.arange(int(chunk.lengths.max())) < chunk.lengths[:, None]

    def padded(values: Floats) -> torch.Tensor:
        rows = np.zeros(place.shape)
        rows[place] = values
        return torch.from_numpy(rows)

    result = correct(
        padded(chunk.log_pi),
        padded(chunk.log_mu),
        torch.from_numpy(place),
        correction=method,
        advantages=torch.from_numpy(chunk.sequences["advantage"]),
        extras=Extras(lags=None if lags is None else padded(lags).int()),
    )
    return result.weights.numpy()[place], result.mask.numpy()[place]


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_holds_what_correct_returns_on_the_same_arrays(name: str) -> None:
    chunk = responses()
    found = row(table_of(evidence_of(chunk)), name)
    weights, mask = corrected(chunk, PRESETS[name].correction)
    sequences = np.arange(chunk.num_sequences)

    def kept(of: np.ndarray) -> Kept:
        tokens = of[chunk.sequence_of]
        return Kept(mask[tokens].mean(), np.mean([mask[chunk.sequence_of == s].any() for s in sequences[of]]))

    everything = kept(np.ones(sequences.size, dtype=bool))
    assert (found.kept_tokens, found.kept_sequences) == (everything.tokens, everything.sequences)
    correct_answers = chunk.sequences["reward"] > 0
    assert found.by_correct == {"correct": kept(correct_answers), "wrong": kept(~correct_answers)}
    assert found.by_sign == {"positive": kept(correct_answers), "negative": kept(~correct_answers)}
    edges = np.sort(chunk.lengths)[[14, 29, 44]]
    lows, highs = [0, *edges], [*edges, 10**9]
    quarters = [(low < chunk.lengths) & (chunk.lengths <= high) for low, high in zip(lows, highs, strict=True)]
    assert found.by_length == [kept(quarter) for quarter in quarters]
    assert found.advantage_removed == pytest.approx(1 - mask.mean(), abs=1e-12), "all |advantages| are equal"
    assert found.ess == pytest.approx(weights.sum() ** 2 / (weights.size * (weights**2).sum()))


def enumerated(noise: float) -> tuple[World, Chunk, Floats, Floats]:
    """A world, a dump that holds each of its responses y mu(y) 4^T times; then mu(y) [Y] and log-ratios [Y, T]."""
    world = World(LENGTH, stops=False, seed=3, gap=noise)
    tables = world.log_pi, world.mu.log()
    log_pi, log_mu = (np.array([world.logprobs(y, table) for y in world.sequences]) for table in tables)
    share = np.exp(log_mu.sum(axis=1))
    times = np.rint(share * 4**LENGTH).astype(int)
    chunk = Chunk(
        np.repeat(log_pi, times, axis=0).ravel(),
        np.repeat(log_mu, times, axis=0).ravel(),
        np.arange(times.sum() + 1) * LENGTH,
        {},
        {"advantage": np.repeat(world.reward.numpy(), times)},
    )
    return world, chunk, share, log_pi - log_mu


def test_cosine_bias_and_ess_are_those_of_the_enumerated_policies() -> None:
    world, chunk, share, log_ratio = enumerated(0.4)
    advantage = world.reward.numpy()
    table = table_of(
        evidence_of(chunk),
        token=RolloutCorrection(Weight(upper=1.2)),
        sequence=RolloutCorrection(Weight("sequence", upper=1.3)),
        mask=RolloutCorrection(Weight(mode="mask", lower=0.8, upper=1.25)),
    )
    ratio, product = np.exp(log_ratio), np.exp(log_ratio.sum(axis=1))
    weights = {
        "token": np.minimum(ratio, 1.2),
        "sequence": np.repeat(np.minimum(product, 1.3)[:, None], LENGTH, axis=1),
        "mask": np.where((ratio >= 0.8) & (ratio <= 1.25), ratio, 0),
    }
    for name, weight in weights.items():
        found = row(table, name)
        assert found.bias == pytest.approx(1 - float(share @ weight.mean(axis=1)), rel=1e-9)
        mean, square = share @ weight.mean(axis=1), share @ (weight**2).mean(axis=1)
        assert found.ess == pytest.approx(mean**2 / square, rel=1e-9)

        def inner(one: Floats, other: Floats) -> float:
            return float(share @ (one * other * advantage[:, None] ** 2).sum(axis=1))

        exact = np.repeat(product[:, None], LENGTH, axis=1)
        cosine = inner(weight, exact) / math.sqrt(inner(weight, weight) * inner(exact, exact))
        assert found.cosine == pytest.approx(cosine, rel=1e-9)
        assert found.bias > 0.01 and found.cosine < 0.999, "neither is trivial"


def test_equal_policies_lose_nothing_under_any_preset() -> None:
    for found in table_of(evidence_of(responses(noise=0.0))).rows:
        assert (found.kept_tokens, found.kept_sequences, found.ess) == (1.0, 1.0, 1.0), found.name
        assert found.bias == 0 and found.advantage_removed == 0 and found.warnings == []
        assert found.cosine == pytest.approx(1.0)


def test_the_drift_that_weights_of_tokens_leave_is_that_of_the_whole_distribution() -> None:
    chunk, random = responses(), np.random.default_rng(3)
    log_mu, log_pi = (np.log(random.dirichlet(np.ones(5), chunk.log_pi.size)) for _ in range(2))
    sampled = dataclasses.replace(chunk, tokens={**chunk.tokens, "top": top_of(log_mu, log_pi)})
    mu, pi = np.exp(log_mu), np.exp(log_pi)
    table = table_of(evidence_of(sampled))
    for name, weight in {"none": 1.0, "token-tis": np.minimum(pi / mu, 2)}.items():
        weighted = mu * weight
        # sum_v mu_v w_v (onehot_v - pi)
        drift = weighted - pi * weighted.sum(axis=1, keepdims=True)
        assert row(table, name).drift_left == pytest.approx(float(np.linalg.norm(drift, axis=1).mean()), rel=1e-4)
    assert row(table, "seq-tis").drift_left is None and row(table, "centered-tis").drift_left is None
    assert {found.drift_left for found in table_of(evidence_of(chunk)).rows} == {None}


def test_methods_whose_columns_are_missing_are_listed_with_them() -> None:
    chunk = dataclasses.replace(responses(), tokens={}, sequences={})
    segments = RolloutCorrection(reject=(Rejection(level="segment", reduce="mean", upper=2.0),))
    table = table_of(evidence_of(chunk), **{n: p.correction for n, p in PRESETS.items()}, segments=segments)
    assert table.not_run == {"dppo": ["advantage"], "off-policy-sequence-mask": ["advantage"], "segments": ["turn"]}
    assert {found.name for found in table.rows} == set(PRESETS) - {"dppo", "off-policy-sequence-mask"}
    for found in table.rows:
        assert (found.by_sign, found.by_correct, found.advantage_removed) == (None, None, None)


BY_LAG = RolloutCorrection(Weight(upper=2.0, upper_by_lag=((0, 2.0), (2, 1.1))))
TOO_OLD = RolloutCorrection(reject=(Rejection("lag", "sequence", "max", upper=2.0),))


@pytest.mark.parametrize("method", [BY_LAG, TOO_OLD])
def test_lags_are_those_of_the_versions_in_the_dump(method: RolloutCorrection) -> None:
    chunk = responses()
    version = np.random.default_rng(2).integers(0, 4, chunk.log_pi.size)
    trained = np.arange(chunk.num_sequences) % 5
    columns = {**chunk.tokens, "version": version}
    chunk = dataclasses.replace(chunk, tokens=columns, sequences={**chunk.sequences, "trainer_version": trained})
    # weights newer than the trainer's, as in a recording of another run, are as fresh as its own
    weights, mask = corrected(chunk, method, np.maximum(trained[chunk.sequence_of] - version, 0).astype(float))
    found = row(table_of(evidence_of(chunk), by_lag=method), "by_lag")
    assert found.kept_tokens == mask.mean()
    assert found.ess == pytest.approx(weights.sum() ** 2 / (weights.size * (weights**2).sum()))
    fresh, _ = corrected(chunk, method, np.zeros(chunk.log_pi.size))
    assert (fresh != weights).any(), "lags matter here"


def test_methods_that_need_what_a_dump_does_not_hold_say_so() -> None:
    methods = {
        "by_lag": BY_LAG, "too_old": TOO_OLD, "two": RolloutCorrection(Weight(upper=1.5, staleness_upper=1.3)),
        "measured": RolloutCorrection(Weight(upper="measured")),
    }  # fmt: skip
    table = table_of(evidence_of(responses()), **methods)
    assert table.rows == [] and table.not_run == {
        "by_lag": ["version", "trainer_version"],
        "too_old": ["version", "trainer_version"],
        "two": ["log-probs by the weights that sampled, which no dump holds"],
        "measured": ["a number for upper, because a measured one comes from the rollout before"],
    }


def test_turns_are_judged_one_by_one() -> None:
    log_mu = np.full(8, -1.0)
    log_pi = log_mu + np.array([0, 0, 0.9, 0.9, 0, 0, 0, 0])
    chunk = Chunk(log_pi, log_mu, np.array([0, 4, 8]), {"turn": np.array([0, 0, 1, 1, 1, 1, 2, 2])})
    segments = RolloutCorrection(reject=(Rejection(level="segment", reduce="mean", upper=2.0),))
    found = row(table_of(evidence_of(chunk), segments=segments), "segments")
    assert (found.kept_tokens, found.kept_sequences) == (0.75, 1.0), "turn 1 of the second response stays"


def test_a_method_that_drops_correct_answers_or_short_ones_is_warned_of() -> None:
    random = np.random.default_rng(1)
    lengths = np.repeat([2, 8, 32, 128], 20)
    log_mu = np.full(lengths.sum(), -1.0)
    log_pi = log_mu + np.where(np.repeat(lengths == 2, lengths), 0.5, 0.0) + 1e-6 * random.normal(size=log_mu.size)
    reward = np.where(lengths == 2, 1.0, 0.0)
    chunk = Chunk(log_pi, log_mu, np.concatenate([[0], np.cumsum(lengths)]), {}, {"reward": reward})
    found = row(table_of(evidence_of(chunk)), "geo-mask")
    short = "drops 100% of the shortest quarter of the responses"
    assert found.warnings == ["drops 100% of the correct answers", short]
    assert [kept.tokens for kept in found.by_length] == [0, 1, 1, 1]
    tokens = RolloutCorrection(Weight(mode="mask", upper=1.2))
    log_pi = log_mu + np.where(np.arange(log_mu.size) % 2 == 0, 0.5, 0.0)
    chunk = dataclasses.replace(chunk, log_pi=log_pi)
    found = row(table_of(evidence_of(chunk), tokens=tokens), "tokens")
    assert found.warnings[0] == "drops 50% of the tokens of the correct answers"


def test_a_method_that_drops_everything_is_warned_of_whatever_the_columns() -> None:
    log_mu = np.full((30, 8), -1.0)
    table = diagnose(log_mu - 0.1, log_mu).what_if
    assert isinstance(table, WhatIfTable) and table.tokens == 240 and not table.has_advantages
    found = row(table, "geo-mask")
    assert (found.kept_tokens, found.ess, found.cosine) == (0, 0, None)
    assert found.warnings == ["drops 100% of the responses"]


def test_rows_with_warnings_come_last() -> None:
    flags = [bool(found.warnings) for found in table_of(evidence_of(responses())).rows]
    assert flags == sorted(flags) and True in flags and False in flags


def test_no_cosine_is_given_where_weights_of_sequences_are_noise() -> None:
    evidence = evidence_of(responses(noise=1.0))
    assert evidence.growth.horizon == pytest.approx(1 / (2 * evidence.whole.k3)) and evidence.growth.horizon < 10
    assert {found.cosine for found in table_of(evidence).rows} == {None}


def test_total_variation_and_bias_by_length_are_those_of_the_enumerated_policies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_rc.analyze.statistics.drift.LENGTHS", (1, 2, 3))
    world, chunk, share, log_ratio = enumerated(0.8)
    found, pi = table_of(evidence_of(chunk)).drift, world.log_pi.exp().numpy()
    for at in found.by_length:
        weight = np.exp(log_ratio[:, : at.length].sum(1))
        # of prefixes: the rows of share that begin alike add up, and the prefix's own weight is the same in all
        assert at.tv == pytest.approx(np.abs(share * (weight - 1)).sum() / 2) and at.tv <= at.tv_bound
        bias = np.zeros_like(pi)
        for y, p, w, ratio in zip(world.sequences, share, weight, np.exp(log_ratio), strict=True):
            for t, (context, token) in enumerate(world.steps(y)[: at.length]):
                score = np.eye(VOCABULARY)[token] - pi[context]
                # the sign of an advantage that makes the bias as large as this prefix can
                bias[context] += p * abs(ratio[t] - w) * np.abs(score)
        assert np.linalg.norm(bias) <= at.bias + 1e-12 <= at.bias_bound + 1e-12
    assert found.by_length[0].bias < 1e-12 < found.by_length[1].bias
    assert found.chi2 == pytest.approx((share[:, None] * (np.exp(log_ratio) - 1) ** 2).sum() / LENGTH)
    assert found.tv == pytest.approx((share[:, None] * np.abs(np.exp(log_ratio) - 1)).sum() / LENGTH / 2)


@pytest.mark.parametrize("name", ["moved", "rare", "wide", "narrow"])
def test_the_page_shows_that_neither_total_variation_nor_chi2_tells_the_other(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs/analyze.md").read_text(encoding="utf-8")
    cells = next(line.split("|") for line in page.splitlines() if line.startswith(f"| {name} "))
    # 1,000 responses of one token, drawn as mu says: (mu, pi) of every id
    ids = [tuple(map(float, pair.split(" → "))) for pair in cells[2].split(",")]
    mu, pi = np.repeat(ids, [round(1000 * mu) for mu, _ in ids], axis=0).T
    found = Drift.of(Chunk(np.log(pi), np.log(mu), np.arange(1001)))
    assert sum(pi for _, pi in ids) == pytest.approx(1) and mu.size == 1000
    assert [f"{found.tv:.3f}", f"{found.chi2:.3f}"] == [cell.strip() for cell in cells[3:5]]


def test_the_table_of_a_dump_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = evidence_of(responses())
    assert table_of(evidence) == table_of(evidence)
    monkeypatch.setattr("megatron_rc.analyze.statistics.what_if.MAX_TOKENS", 500)
    assert (few := table_of(evidence)) == table_of(evidence)
    assert 400 < few.tokens <= 500 and few.sequences < 60


def test_the_terminal_shows_eight_methods_and_the_recommended_one_first() -> None:
    chunk, reward = policy_lag(world(1, sequences=60)), np.random.default_rng(1).integers(0, 2, 60).astype(float)
    columns = {**chunk.sequences, "reward": reward, "advantage": reward - reward.mean()}
    diagnosis = diagnosed(dataclasses.replace(chunk, sequences=columns))
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the test
    terminal.show_what_if(diagnosis, console=console)
    rows, _, reason = console.export_text().strip().partition("A dash: ")
    assert "equal lengths leave a quarter by length empty" in " ".join(reason.split())
    names = [line.split()[0] for line in rows.splitlines()[2:]]
    assert len(names) == 8 and names[0] == diagnosis.recommendation.method


def test_only_the_table_needs_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = diagnosed(responses())
    monkeypatch.setitem(sys.modules, "torch", None)
    assert diagnosis.recommendation.method and diagnosis.what_if == Missing(
        f"what-if needs torch: {installing('train')}"
    )
