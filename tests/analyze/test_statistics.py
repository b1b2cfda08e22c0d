"""The statistics behind a diagnosis, against known laws and the plain way; honest batches raise no alarm."""

import math
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from simulated_dumps import diagnosed, evidence_of, one_stale_server, small_honest, world

from megatron_rc.analyze import atlas, diagnose, evidence, terminal
from megatron_rc.analyze.chunk import Chunk, loss_tokens
from megatron_rc.analyze.diagnosis import diagnosis_of
from megatron_rc.analyze.headline import COHERENT, LARGE_K3, OFFSET, headline
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.rules import judge
from megatron_rc.analyze.rules.rule import Level
from megatron_rc.analyze.statistics import displacement, growth
from megatron_rc.analyze.statistics.factors import FACTORS, octave, octave_start
from megatron_rc.analyze.statistics.growth import GrowthSums
from megatron_rc.analyze.statistics.profile import Permutations, ProfileSums, explained_by_means, gamma_deviate
from megatron_rc.analyze.statistics.reservoir import MAX_TOKENS, Reservoir
from megatron_rc.analyze.statistics.sign_flips import sign_flip_test
from megatron_rc.analyze.statistics.significance import Test, holm, normal_p, self_normalised
from megatron_rc.analyze.statistics.tail import TailSums, pareto_shape


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9])
def test_k_hat_is_the_shape_of_a_pareto_tail(shape: float) -> None:
    sums = TailSums()
    for part in range(4):
        sums.add(-shape * np.log(np.random.default_rng(part).random(50_000)))
    assert sums.tail().k == pytest.approx(shape, abs=0.08)


def test_holm_corrects_the_smallest_p_most() -> None:
    tests = [Test("a", 0, 0.01), Test("b", 0, 0.04), Test("c", 0, 0.03), Test("d", 0, None, "undecided")]
    assert holm(tests) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def test_a_sum_that_one_term_dominates_is_undecided() -> None:
    assert self_normalised("z", 10.0, 100.0, 4.0).p == pytest.approx(normal_p(1.0))
    heavy = self_normalised("z", 10.0, 100.0, 40.0)
    assert heavy.p is None and "40%" in heavy.undecided


def test_the_explained_share_is_eta_squared_less_what_chance_explains() -> None:
    chunk = loss_tokens(one_stale_server(world(1, sequences=32)))
    sums = ProfileSums(FACTORS["server"])
    sums.add(chunk)
    values, servers = np.abs(chunk.log_ratio), chunk.per_token("server")
    means = {name: values[servers == name].mean() for name in set(servers.tolist())}
    within = sum(((values[servers == name] - mean) ** 2).sum() for name, mean in means.items())
    whole = ((values - values.mean()) ** 2).sum()
    expected = 1 - within / (values.size - len(means)) / (whole / values.size) * (1 - 0 / values.size)
    assert sums.profile().explained == pytest.approx(expected, rel=0.01)


def test_permutation_p_values_of_honest_dumps_are_uniform() -> None:
    permutations = (Permutations(loss_tokens(small_honest(seed))) for seed in range(200))
    p_values = [each.test("position", FACTORS["position"]).p for each in permutations]
    distance = np.abs(np.sort(p_values) - (np.arange(200) + 0.5) / 200).max()
    assert distance < 0.115, "the 1 % point of Kolmogorov and Smirnov's statistic at 200 values"


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_sign_flip_p_values_of_honest_dumps_are_uniform(noise: float) -> None:
    """Over 200 dumps whose |l| grows with -log mu, which a permutation of the tokens would take for a dependence."""
    tests = [sign_flip_test("sign", loss_tokens(small_honest(seed, sequences=32, noise=noise))) for seed in range(200)]
    distance = np.abs(np.sort(np.array([test.p for test in tests], dtype=float)) - (np.arange(200) + 0.5) / 200).max()
    assert distance < 0.115, "the 1 % point of Kolmogorov and Smirnov's statistic at 200 values"


@pytest.mark.parametrize("noise", [0.1, 0.4, 0.8])
def test_sign_flips_let_large_honest_noise_pass(noise: float) -> None:
    """All of it is on one side, so l goes with the log-prob by regression: the allowance for that covers it."""
    tests = [sign_flip_test("sign", loss_tokens(small_honest(seed, sequences=64, noise=noise))) for seed in range(60)]
    assert np.mean([test.p < 0.05 for test in tests if test.p is not None]) <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / 60)


def test_sign_flips_of_few_tokens_are_undecided() -> None:
    test = sign_flip_test("sign", loss_tokens(small_honest(1, sequences=12)))
    assert test.p is None and test.undecided == "fewer than 20 runs of up to 64 tokens"


def test_gamma_deviates_have_the_tail_of_the_gamma_law() -> None:
    draws = np.random.default_rng(1).gamma(3.0, 2.0, 200_000)
    for level in (1.0, 2.0, 3.0):
        beyond = np.mean([gamma_deviate(value, 6.0, 12.0) > level for value in draws[:50_000]])
        assert beyond == pytest.approx(normal_p(level, two_sided=False), rel=0.2)


def test_every_sequence_has_the_same_chance_of_the_reservoir() -> None:
    kept = np.zeros(60)
    for seed in range(300):
        reservoir = Reservoir(max_tokens=200, seed=seed)
        for start in range(0, 60, 20):
            values, names = np.zeros(200), np.arange(start, start + 20)
            reservoir.add(Chunk(values, values, np.arange(21) * 10, {}, {"step": names}))
        sample = reservoir.sample()
        assert sample.log_pi.size <= 200
        kept[sample.sequences["step"]] += 1
    assert np.abs(kept - 100).max() < 4.5 * np.sqrt(300 * 1 / 3 * 2 / 3)


def test_the_sample_holds_tokens_whatever_empty_sequences_come_first() -> None:
    log_mu = np.full(MAX_TOKENS + 1, -1.0)
    offsets = np.array([0, 0, 0, 0, 0, 0, 0, 0, log_mu.size])
    assert evidence_of(Chunk(log_mu - 0.01, log_mu, offsets)).sample.lengths.tolist() == [log_mu.size]


def test_memory_does_not_grow_with_the_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "Reservoir", partial(Reservoir, 5_000))
    held = []

    def chunks() -> Iterator[Chunk]:
        for step in range(30):
            yield small_honest(step, sequences=40, length=200)
            held.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    diagnosis_of(chunks(), "a dump", "arrays", CorruptRows())
    tracemalloc.stop()
    assert held[-1] - held[9] < 20 * 8_000 * 8, "less than one column of what came since"


def test_growth_takes_no_token_and_responses_beyond_its_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "LENGTHS", np.array([1, 4]))
    sums, log_ratio = GrowthSums(), np.random.default_rng(1).normal(size=(30, 20))
    assert sums.add(Chunk(np.zeros(0), np.zeros(0), np.zeros(4, dtype=np.int64))).size == 0
    assert np.isnan([sums.growth().ess, sums.growth().ess_predicted]).all() and np.isinf(sums.growth().horizon)
    sums.add(Chunk(log_ratio.reshape(-1), np.zeros(600), np.arange(31) * 20))
    assert sums.growth().deviations == pytest.approx([log_ratio[:, :n].sum(axis=1).std() for n in (1, 4)])
    weights = np.exp(log_ratio.sum(axis=1))
    assert sums.growth().ess == pytest.approx(weights.sum() ** 2 / (30 * (weights**2).sum()))


@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_tokens_that_grow_noisier_do_not_add_up_and_an_offset_of_a_response_does(offset: float) -> None:
    random, sequences, tokens = np.random.default_rng(1), 500, 16
    noise = 0.02 * np.arange(1, tokens + 1) * random.normal(size=(sequences, tokens))
    log_ratio = noise + offset * random.normal(size=(sequences, 1))
    log_mu = np.full(sequences * tokens, -1.0)
    found = diagnosed(Chunk(log_mu + log_ratio.ravel(), log_mu, np.arange(sequences + 1) * tokens))
    measured = found.evidence.growth
    assert measured.exponent >= OFFSET and found.evidence.whole.k3 > LARGE_K3
    assert (measured.coherence > COHERENT) == bool(offset) == ("adds up" in headline(found))
    if not offset:
        assert measured.coherence == pytest.approx(1, abs=0.2)


def test_a_systematic_rounding_of_log_probs_is_not_called_missing_probability() -> None:
    # a server in fp32: each log-prob 8e-6 above the trainer's
    log_mu = -np.random.default_rng(1).exponential(1, 20_000)
    log_pi = log_mu - 8e-6 + 1e-5 * np.random.default_rng(2).normal(size=log_mu.size)
    found = diagnosed(Chunk(np.minimum(log_pi, 0), log_mu, np.arange(201) * 100))
    assert found.evidence.significant(found.evidence.whole.z_ratio) and found.level == "numerics"
    shown = " ".join(terminal.text(found).split())
    assert "cannot be drawn" not in shown.partition("Honesty")[2] and "not a small honest" not in shown
    assert "1 within the rounding of log-probs" in shown and "kappa says nothing" in shown


def test_octaves_have_four_bins_per_power_of_two() -> None:
    values = np.arange(1, 5000)
    assert (np.array([octave_start(code) for code in octave(values)]) <= values).all()
    assert (np.array([octave_start(code + 1) for code in octave(values)]) > values).all()


def test_bins_that_differ_in_variance_only_explain_nothing_of_the_sign() -> None:
    """Rare tokens have few neighbours in their bin and large log-ratios of mean 0."""
    random = np.random.default_rng(0)
    count = np.array([5000.0, 20.0, 3.0, 1.0, 1.0])
    shares = []
    for _ in range(400):
        values = [size * random.normal(size=int(n)) for n, size in zip(count, (1e-3, 0.05, 0.2, 1, 1), strict=True)]
        total, squares = (np.array([(v**power).sum() for v in values]) for power in (1, 2))
        several = count > 1
        shares.append(((total**2 - squares)[several] / (count - 1)[several]).sum() / squares.sum())
        assert explained_by_means(count, total, squares) == pytest.approx(max(0.0, shares[-1]))
    assert abs(np.mean(shares)) < 4 * np.std(shares) / 20
    shifted = np.array([1.0, 4.0])
    assert explained_by_means(shifted * 100, shifted * 100, shifted * 100) == pytest.approx(1.0)


def test_the_tail_of_two_billion_weights_is_fitted_in_little_memory() -> None:
    excesses = np.sort(np.random.default_rng(0).pareto(3.0, 134_000))[::-1]
    tracemalloc.start()
    shape = pareto_shape(excesses)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert abs(shape - 1 / 3) < 0.01
    assert peak < 20 * 2**20


def test_a_dump_of_damaged_responses_alone_says_what_is_wrong_with_them() -> None:
    said = "no loss token left without the damaged responses: 1 with NaN log-probs, 2 with log-probs above 0 .are they"
    with pytest.raises(ValueError, match=said):
        diagnose(np.array([0.5, -1, math.nan, 0.5]), np.full(4, -1.0), np.array([0, 2, 4]))


def test_a_horizon_of_one_token_is_one_token() -> None:
    reaches = [growth.Growth(np.zeros(1), 0.5, 1.0, 1.0, 1.0, tokens).reach for tokens in (1.2, 1234.5, math.inf)]
    assert reaches == ["1 token", "1,234 tokens", "no limit"]


def of_noise(sigma: float, tokens: int = 60_000) -> Chunk:
    """Tokens that mu drew, whose log-odds the trainer sees displaced by normal noise."""
    rng = np.random.default_rng(0)
    odds, eps = rng.normal(2, 4, tokens), rng.normal(0, sigma, tokens)
    pi, mu = -np.log1p(np.exp(-odds)), -np.log1p(np.exp(eps - odds))
    return Chunk(log_pi=pi, log_mu=mu, cu_seqlens=np.array([0, tokens]), tokens={}, sequences={})


def test_noise_on_logits_is_found_at_every_confidence() -> None:
    assert displacement.by_confidence(of_noise(0.1), 500) == pytest.approx([0.1 * np.sqrt(2 / np.pi)] * 5, rel=0.05)


def test_a_range_of_few_tokens_has_no_value_and_certain_tokens_have_no_log_odds() -> None:
    assert displacement.by_confidence(of_noise(0.1, 40), 30) == [None] * 5
    p = np.array([1e-8, 0.3, 0.999, 1 - 1e-6])
    np.testing.assert_allclose(displacement.log_odds(np.log(p)), np.log(p) - np.log1p(-p), rtol=1e-9)
    assert np.isfinite(displacement.log_odds(np.array([0.0, -1e-12]))).all()


def test_every_curve_of_the_atlas_has_a_value_for_each_range() -> None:
    curves = atlas.by_confidence()
    assert "Qwen1.5-MoE-A2.7B, bf16" in curves
    assert {len(values) for values in curves.values()} == {len(displacement.EDGES) - 1}


LEVEL = 0.05
TRUE_EFFECT = "|l| by logged log-prob"
"""|l| does depend on the log-prob in honest dumps; no rule calls that a bug."""
ONE_SIDED = ("mean l", "alignment")
"""Their p-values are uniform at the edge of what is honest and larger inside of it."""
FEWEST = 400
"""Decided batches from which a rate is compared: a test of few tokens is mostly undecided."""


@pytest.mark.parametrize("batches", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_false_alarms_of_tests_rules_and_reports_are_within_the_binomial_interval(batches: int) -> None:
    decided: dict[str, list[bool]] = defaultdict(list)
    reports: list[float] = []
    answers: Counter[tuple[str, Level]] = Counter()
    for seed in range(batches):
        evidence = evidence_of(small_honest(seed, length=40))
        for test in evidence.tests:
            if test.p is not None:
                decided[test.name].append(test.p < LEVEL)
        reports.append(min(p for name, p in evidence.adjusted.items() if name != TRUE_EFFECT))
        answers.update((verdict.code, verdict.level) for verdict in judge(evidence).verdicts)

    def upper(rate: float, count: int) -> float:
        return rate + 4 * float(np.sqrt(rate * (1 - rate) / count))

    compared = {name: hits for name, hits in decided.items() if len(hits) >= FEWEST * batches / 1000}
    assert {"z_rho of the dump", "z_W of the dump", "|l| by server", "|l| by position in the response"} <= set(compared)
    for name, hits in compared.items():
        rate, most = float(np.mean(hits)), upper(LEVEL, len(hits))
        assert name == TRUE_EFFECT or rate <= most, f"{name}: {rate:.3f} of {len(hits)}"
        if not name.startswith((*ONE_SIDED, TRUE_EFFECT)):
            assert rate >= 2 * LEVEL - most, f"{name}: {rate:.3f} of {len(hits)}"
    assert np.mean(np.array(reports) < LEVEL) <= upper(LEVEL, batches)
    assert answers["RC501", Level.NUMERICS] >= batches * (1 - upper(0.01, batches))
    for (code, level), count in answers.items():
        assert level is Level.NUMERICS or count <= batches * upper(0.01, batches), f"{code} {level}: {count}"
        assert level is not Level.BUG
