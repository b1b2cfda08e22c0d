"""Honesty by enumeration, and draws against the sampler's own top log-probs: right on faults, else silent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from enumeration import World
from simulated_dumps import chunk_of, diagnosed, draw, honest, kept, levels, log_softmax, repetition_penalty, world
from tiny_models import DENSE, transformers_model
from torch import Tensor

from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.readers import open_dump, parquet
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile
from megatron_rc.analyze.rules.rule import Level
from megatron_rc.analyze.statistics import sums
from megatron_rc.analyze.statistics.draws import FIELDS, SETS, came_before, columns_of, draws_of
from megatron_rc.analyze.statistics.grid import grid, logit_grid
from megatron_rc.engine import HiddenSampling, SamplingParams
from megatron_rc.rollout.embedded.engine import EmbeddedEngine

K = 64


def test_over_all_tokens_every_set_is_drawn_as_often_as_its_mass_and_the_score_has_mean_0_and_its_variance() -> None:
    random = np.random.default_rng(0)
    logits = np.round(3 * random.normal(size=(6, 40)), 1)  # many ids are equally probable
    for log_q in log_softmax(logits):
        came = np.broadcast_to(random.random(40) < 0.3, (40, 40))
        found = draws_of(np.tile(log_q, (40, 1)), log_q, came)
        q = np.exp(log_q)[:, None]
        np.testing.assert_allclose((q * found["drawn"]).sum(0), found["mass"][0], atol=1e-5)
        np.testing.assert_allclose((q * found["score"]).sum(0), 0, atol=1e-5)
        # an id that came before shares the place of its equals, so that its score is a mean
        squares, information = ((q * values).sum(0)[:-1] for values in (found["score"] ** 2, found["information"]))
        np.testing.assert_allclose(squares, information, atol=1e-4)
        assert (found["mass"][:, SETS.index("top-k 20")] == found["mass"][0, SETS.index("top-k 20")]).all()


def test_a_set_that_reaches_beyond_the_listed_ids_is_known_where_they_reach_its_edge() -> None:
    log_q = np.sort(log_softmax(np.random.default_rng(1).normal(size=(1, 60)) * 3))[:, ::-1]
    whole, head = (draws_of(np.tile(log_q[:, :k], (60, 1)), log_q[0]) for k in (60, 25))
    reached = [name for name, mass in zip(SETS, head["mass"][0], strict=True) if mass > 0]
    assert {"top-k 20", "min-p 0.1", "top-p 0.9"} <= {*reached} and "top-k 50" not in reached
    for name in reached[1:]:
        number = SETS.index(name)
        for field in ("mass", "drawn"):
            np.testing.assert_allclose(head[field][:, number], whole[field][:, number], atol=1e-6)
    assert head["mass"][0, 0] == pytest.approx(np.exp(log_q[0, 25:]).sum(), abs=1e-6)


def test_ids_that_came_before_are_those_of_the_same_response() -> None:
    ids, cu_seqlens = np.array([5, 3, 5, 3, 7]), np.array([0, 3, 5])
    found = came_before(np.tile([3, 5, 7, 9], (5, 1)), ids, cu_seqlens)
    assert found.astype(int).tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]


def logged(w: Any, drawn_from: np.ndarray, ids: np.ndarray | None = None) -> Chunk:
    """Drawn from [N, V] log-probs, logged with those of the sampler, and with its K most probable ids."""
    log_mu = log_softmax(w.noisy)
    ids = draw(w.random, drawn_from) if ids is None else ids
    chunk = chunk_of(w, ids, log_softmax(w.logits), log_mu)
    top = np.argsort(-log_mu, axis=1)[:, :K]
    listed = np.take_along_axis(log_mu, top, axis=1)
    columns = columns_of(listed, chunk.log_mu, chunk.cu_seqlens, top_ids=top, token_id=ids)
    return replace(chunk, tokens={**columns, "token_id": ids})


def zipf(w: Any, size: float = 1.0) -> Any:
    """With ids that are as frequent as those of a language, if ``size`` is 1."""
    frequent = -size * np.log1p(np.arange(w.logits.shape[1]))
    return replace(w, logits=w.logits + frequent, noisy=w.noisy + frequent)


def only(log_probs: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.where(keep, log_probs, -np.inf)


FAULTS = {
    "temperature 0.9": (lambda q: q / 0.9, "about 0.9"),
    "temperature 1.15": (lambda q: q / 1.15, "about 1.1"),
    "temperature 0.4": (lambda q: q / 0.4, "or less"),
    **{f"top-p {p}": (lambda q, p=p: only(q, kept(q, p)), f"beyond top-p {p} ") for p in (0.8, 0.9, 0.95, 0.99)},
    "top-k 20": (lambda q: only(q, q >= np.sort(q, 1)[:, -20:-19]), "beyond top-k 20 "),
    **{
        f"min-p {m}": (lambda q, m=m: only(q, q >= q.max(1, keepdims=True) + np.log(m)), f"beyond min-p {m} ")
        for m in (0.05, 0.1)
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_sampler_did_after_it_had_logged_is_named(name: str) -> None:
    change, said = FAULTS[name]
    w = world(3, sequences=160 if name == "top-p 0.99" else 48)
    found = diagnosed(logged(w, change(log_softmax(w.noisy))))
    assert levels(found) == {"RC109": Level.BUG}
    assert said in found.verdicts[0].sentence


def test_a_penalty_on_repetitions_that_is_not_in_the_logs_is_named() -> None:
    w = world(4, sequences=48)
    found = diagnosed(logged(w, w.noisy, repetition_penalty(w, 1.3).tokens["token_id"]))
    assert levels(found) == {"RC109": Level.BUG} and "of ids that came before" in found.verdicts[0].sentence


def test_over_all_tokens_a_listed_id_is_drawn_as_often_as_its_probability_with_the_variance_of_one_draw() -> None:
    for log_q in log_softmax(3 * np.random.default_rng(2).normal(size=(6, 40))):
        ids, q = np.arange(40), np.exp(log_q)[:, None]
        found = columns_of(np.tile(log_q, (40, 1)), log_q, ids, top_ids=np.tile(ids, (40, 1)), token_id=ids)["draws"]
        assert found["top_id"][0].tolist() == np.argsort(-log_q)[:8].tolist()
        score, listed = found["top_drawn"] - found["top_q"], found["top_q"][0]
        np.testing.assert_allclose((q * score).sum(0), 0, atol=1e-6)
        np.testing.assert_allclose((q * score**2).sum(0), listed * (1 - listed), atol=1e-6)


@pytest.mark.parametrize("size", [-np.inf, -1.0, -0.5, 0.5, 1.0])
def test_a_bias_on_an_id_that_is_not_in_the_logs_is_named_from_five_standard_errors_on(size: float) -> None:
    w = zipf(world(6, sequences=48))
    bias = np.where(np.arange(256) == 1, size, 0.0)
    found = diagnosed(logged(w, log_softmax(w.noisy + bias)))
    assert found.evidence.worst_id.test.z**2 > 25
    assert levels(found) == {"RC109": Level.BUG}
    assert "token id 1 was drawn" in found.verdicts[0].sentence
    if abs(size) < 1:
        assert found.verdicts[0].numbers["bias"] == pytest.approx(size, abs=0.15)


@pytest.mark.parametrize("name", ["temperature 0.9", "top-p 0.9", "top-k 20", "min-p 0.1"])
def test_what_moves_all_ids_is_no_bias_of_the_most_frequent_one(name: str) -> None:
    change, said = FAULTS[name]
    w = zipf(world(7, sequences=96))
    found = diagnosed(logged(w, change(log_softmax(w.noisy))))
    assert said in found.verdicts[0].sentence
    penalised = logged(w, w.noisy, repetition_penalty(w, 1.3).tokens["token_id"])
    assert "of ids that came before" in diagnosed(penalised).verdicts[0].sentence


@pytest.mark.parametrize(("step", "temperature"), [(0.0, 1.0), (1 / 16, 1.0), (1 / 8, 0.7)])
def test_the_steps_of_the_samplers_logits_are_read_from_its_top_log_probs(step: float, temperature: float) -> None:
    w = world(8, sequences=24)
    noisy = np.round(w.logits / step) * step if step else w.noisy
    w = replace(w, logits=w.logits / temperature, noisy=noisy / temperature)
    log_mu, ids = log_softmax(w.noisy).astype(np.float32), draw(w.random, log_softmax(w.noisy))
    chunk = chunk_of(w, ids, log_softmax(w.logits), log_mu, temperature=np.full(24, temperature))
    top = -np.sort(-log_mu, axis=1)[:, :K]
    columns = columns_of(top, chunk.log_mu, chunk.cu_seqlens, temperature=np.full(ids.size, temperature))
    found = logit_grid(replace(chunk, tokens=columns))
    if not step:
        assert found is None
    else:
        assert found.name == f"1/{1 / step:g}" and 0.5 < found.share <= 1


@pytest.mark.parametrize(("name", "kept_as"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_log_probs_that_were_kept_in_16_bits_are_told_from_those_of_32(name: str, kept_as: torch.dtype) -> None:
    chunk = honest(world(9, noise=1e-4, sequences=12))
    exact = torch.tensor(chunk.log_mu).float()
    assert grid(replace(chunk, log_mu=exact.double().numpy())) is None
    found = grid(replace(chunk, log_mu=exact.to(kept_as).double().numpy()))
    assert found.name == name and 0.5 < found.share <= 1
    rounded = replace(chunk, log_mu=exact.to(kept_as).double().numpy())
    assert "RC108" not in levels(diagnosed(rounded))


def test_an_honest_sampler_is_never_accused_whatever_the_trainer_does() -> None:
    for seed in range(24):
        w = zipf(world(seed, noise=(0.03, 0.6)[seed % 2], sequences=24), seed // 2 % 2)
        assert "RC109" not in levels(diagnosed(logged(w, log_softmax(w.noisy)), select=("RC109",))), seed


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        (HiddenSampling(), None),
        (HiddenSampling(temperature=0.8), "about 0.8"),
        (HiddenSampling(top_p=0.9), "beyond top-p 0.9 "),
    ],
)
def test_a_file_of_a_real_engine_is_read_and_its_hidden_sampling_named(
    hidden: HiddenSampling, said: str | None, tmp_path: Path
) -> None:
    config = DENSE | {"initializer_range": 0.25}
    engine = EmbeddedEngine(config, dtype="fp32", device="cpu")
    engine.update_weights(transformers_model(config, seed=5).state_dict().items(), 0)
    params = SamplingParams(max_new_tokens=20, top_logprobs=16, hidden=hidden)
    samples = engine.generate([[i, 3] for i in range(10)], params, n=20, seeds=range(200))
    noise = np.random.default_rng(0)
    lists = {
        "old_logprobs": [(s.logprobs + noise.normal(0, 1e-3, len(s.logprobs))).clip(max=0).tolist() for s in samples],
        "rollout_logprobs": [list(s.logprobs) for s in samples],
        "output_ids": [list(s.output_ids) for s in samples],
        "top_ids": [s.top_ids.tolist() for s in samples],
        "top_rollout_logprobs": [s.top_rollout_logprobs.tolist() for s in samples],
    }
    pq.write_table(pa.table(lists), tmp_path / "step-000001.parquet")
    found = diagnose_dump(tmp_path)
    assert found.evidence.draws is not None and found.evidence.has("draws")
    # miles' train data hold the same as tensors per sample
    names = {"log_probs": "old_logprobs", "rollout_log_probs": "rollout_logprobs", "rollout_topk_log_probs":
             "top_rollout_logprobs", "rollout_topk_token_ids": "top_ids"}  # fmt: skip
    columns = {name: [torch.tensor(row) for row in lists[own]] for name, own in names.items()}
    columns["tokens"] = [torch.tensor([*s.prompt_ids, *s.output_ids]) for s in samples]
    columns |= {f"{name}_lengths": [len(row) for row in columns[of]] for name, of in
                (("response", "log_probs"), ("total", "tokens"))}  # fmt: skip
    torch.save({"rollout_id": 0, "rank": 0, "rollout_data": columns}, tmp_path / "miles.pt")
    of_files = (join([*open_dump(tmp_path / name).chunks()]) for name in ("miles.pt", "step-000001.parquet"))
    draws_of_miles, draws = (chunk.tokens["draws"] for chunk in of_files)
    for field in FIELDS:
        np.testing.assert_allclose(draws_of_miles[field], draws[field])
    columns["rollout_topk_log_probs"][0] = columns["rollout_topk_log_probs"][0][:, :-1]
    torch.save({"rollout_id": 0, "rank": 0, "rollout_data": columns}, tmp_path / "miles.pt")
    list((dump := open_dump(tmp_path / "miles.pt")).chunks())
    assert dump.corrupt.count == 1 and "rollout_topk_log_probs as many numbers" in dump.corrupt.first[0]
    codes = levels(found)
    if said is None:
        assert "RC109" not in codes
    else:
        assert codes["RC109"] is Level.BUG and said in found.verdicts[0].sentence


def test_lists_of_top_logprobs_make_chunks_smaller_and_are_left_out_where_they_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [[-1.0, -2.0]] * 40
    tables: Any = [{"top_rollout_logprobs": [[[-1.0] * size, [-2.0] * size]] * 40} for size in (64, 256)]
    tables = [pa.table({"old_logprobs": numbers, "rollout_logprobs": numbers} | lists) for lists in tables]
    group: Group = (tmp_path / "step-000001.parquet",)
    with pq.ParquetWriter(group[0], tables[0].schema) as file:
        for table in tables:
            file.write_table(table)
    assert [chunk.log_mu.size for chunk in parquet.read(group, CorruptRows())] == [160]
    monkeypatch.setattr(parquet, "CHUNK_TOKENS", 400)
    whole = [*parquet.read(group, CorruptRows())]
    assert len(whole) > 4 and all(chunk.has("draws") for chunk in whole)
    monkeypatch.setattr(parquet, "MAX_GROUP_VALUES", 10_000)
    found = [*parquet.read(group, CorruptRows())]
    assert {chunk.has("draws") for chunk in found} == {True, False}
    assert sum(chunk.log_mu.size for chunk in found) == 160
    monkeypatch.setattr(parquet, "MAX_GROUP_VALUES", 50)
    with pytest.raises(UnreadableFile, match="write smaller row groups"):
        [*parquet.read(group, CorruptRows())]


def test_a_file_without_them_judges_no_draws_and_one_of_another_type_is_refused(tmp_path: Path) -> None:
    lists: dict[str, Any] = {"old_logprobs": [[-1.0, -2.0]], "rollout_logprobs": [[-1.0, -2.0]]}
    for name, top, read in (
        ("none", None, False),
        ("ragged", [[[-1.0, -3.0], [-2.0]]], True),
        ("few", [[[-1.0]]], False),
    ):
        table = pa.table(lists | ({} if top is None else {"top_rollout_logprobs": top}))
        pq.write_table(table, tmp_path / f"{name}.parquet")
        found = diagnose_dump(tmp_path / f"{name}.parquet")
        assert (found.evidence.draws is not None) == read, name
        assert ("RC109" in found.judgement.not_run) != read, name
    pq.write_table(pa.table(lists | {"top_rollout_logprobs": [[-1.0, -2.0]]}), tmp_path / "flat.parquet")
    with pytest.raises(ValueError, match="'top_rollout_logprobs' must be a list of lists of numbers"):
        diagnose_dump(tmp_path / "flat.parquet")


LENGTH = 3
WORLD = World(LENGTH, stops=False, gap=2.0)


def expected(trainer: Tensor, drawn_from: Tensor, logged: Tensor, name: str) -> float:
    """Expectation of a sum over a response, when ``drawn_from`` draws it and ``logged`` is what the dump says.

    All three are log-probs by context and token.
    """
    chances = WORLD.probability(drawn_from).numpy()
    drawn = [y for y, chance in zip(WORLD.sequences, chances, strict=True) if chance > 0]
    steps = [step for y in drawn for step in WORLD.steps(y)]
    pi, mu = (np.array([table[step].item() for step in steps]) for table in (trainer, logged))
    entropy = torch.special.entr(trainer.exp()).sum(1)[[context for context, _ in steps]].numpy()
    rows = sums.sequence_sums(Chunk(pi, mu, np.arange(len(drawn) + 1) * LENGTH, {"entropy": entropy}))
    return float(chances[chances > 0] @ rows[:, sums.FIELDS.index(name)])


@pytest.mark.parametrize("noise", [0.01, 0.3, 2.0])
def test_honest_logs_give_zero_expectations_at_any_size_of_mismatch(noise: float) -> None:
    world = World(LENGTH, stops=False, gap=noise)
    trainer, sampler = world.log_pi, world.mu.log()
    assert abs(expected(trainer, sampler, sampler, "excess")) < 1e-12
    assert abs(expected(trainer, sampler, sampler, "surprise")) < 1e-12
    assert expected(trainer, sampler, sampler, "log_ratio") < 0


def test_truncated_logs_lower_the_mean_ratio_by_the_mass_that_was_cut() -> None:
    trainer = WORLD.log_pi
    cut = torch.where(trainer >= trainer.max(1, keepdim=True).values, 0.0, -torch.inf)
    lost, prefix = 0.0, ()
    for _ in range(LENGTH):
        row = trainer[WORLD.contexts[prefix]]
        lost, prefix = lost + 1 - row.max().exp().item(), (*prefix, int(row.argmax()))
    assert expected(trainer, cut, cut, "excess") == pytest.approx(-lost)


def test_a_hidden_temperature_shows_in_the_surprise_alone() -> None:
    trainer = WORLD.log_pi
    colder = (trainer / 0.7).log_softmax(1)
    assert abs(expected(trainer, colder, trainer, "excess")) < 1e-12
    assert expected(trainer, colder, trainer, "surprise") < -0.1


def test_raw_logs_raise_the_mean_log_ratio_above_zero() -> None:
    raw = WORLD.log_pi
    tempered = (raw / 0.7).log_softmax(1)
    assert expected(tempered, tempered, raw, "log_ratio") > 0.05
    assert expected(tempered, tempered, raw, "excess") > 0.05
