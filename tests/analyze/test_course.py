"""The course of a run: why k3 grew, where it jumps, what moves with it, and that nothing is seen where nothing is."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated_dumps import diagnosed

from megatron_rc.analyze import output, report_text
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.pages.steps import over_steps
from megatron_rc.analyze.statistics.changes import find_changes
from megatron_rc.analyze.statistics.decomposition import between, decompose
from megatron_rc.analyze.statistics.lead_lag import FEWEST, lead_lag
from megatron_rc.analyze.statistics.steps import Step, StepSums
from megatron_rc.analyze.statistics.sums import sequence_sums
from megatron_rc.analyze.statistics.timeline import logged_next_to, timeline


def step_chunk(
    step: int, seed: int, *, sigma: float = 0.05, certainty: float = 1.0, length: int = 40, sequences: int = 200
) -> Chunk:
    """Tokens with l = sigma (1 - p) e - (that)^2 / 2, whose ratios have mean 1; larger ``certainty``, larger p."""
    random = np.random.default_rng([seed, step])
    lengths = random.integers(length // 2, 3 * length // 2, sequences)
    p = random.random(int(lengths.sum())) ** (1 / certainty)
    scale = sigma * (1 - p)
    log_ratio = scale * random.normal(size=p.size) - scale**2 / 2
    log_pi = np.log(p)
    columns = {"step": np.full(sequences, step), "reward": random.random(sequences)}
    entropy = np.full(p.size, 0.5 / certainty)
    return Chunk(log_pi, log_pi - log_ratio, np.concatenate([[0], np.cumsum(lengths)]), {"entropy": entropy}, columns)


def steps_of(*chunks: Chunk) -> tuple[Step, ...]:
    sums = StepSums()
    for chunk in chunks:
        sums.add(chunk, sequence_sums(chunk))
    return sums.steps()


@pytest.mark.parametrize(
    ("after", "cause", "share"),
    [({"sigma": 0.1}, "engine", 1.0), ({"certainty": 0.3}, "entropy", 1.0), ({"length": 160}, "length", None)],
)
def test_the_growth_is_put_down_to_what_grew(after: dict, cause: str, share: float | None) -> None:
    found = decompose(steps_of(step_chunk(1, 1), step_chunk(2, 1, **after)))
    parts = {part.name: part for part in found.parts}
    assert max(parts.values(), key=lambda part: abs(math.log(part.factor))).name == cause
    if share is None:
        assert not found.changed and all(part.share is None for part in found.parts)
        assert parts["length"].factor == pytest.approx(4, rel=0.1) and parts["length"].nats is None
    else:
        assert found.changed
        assert parts[cause].share == pytest.approx(share, abs=4 * parts[cause].share_error)


def test_the_parts_add_up_to_the_growth_without_a_rest() -> None:
    found = decompose(steps_of(step_chunk(1, 2), step_chunk(2, 2, sigma=0.4, certainty=0.5, length=90)))
    of_k3 = [part for part in found.parts if part.name != "length"]
    assert math.prod(part.factor for part in of_k3) == pytest.approx(found.after.k3 / found.before.k3, rel=1e-12)
    assert sum(part.share for part in of_k3) == pytest.approx(1, rel=1e-12)
    assert sum(part.nats for part in of_k3) == pytest.approx(found.after.k3 - found.before.k3, rel=1e-9)
    whole = math.prod(part.factor for part in found.parts)
    sums = [side.k3 * side.mean_length for side in (found.before, found.after)]
    assert whole == pytest.approx(sums[1] / sums[0], rel=1e-12)


def test_both_orders_of_the_groups_give_the_same_shares() -> None:
    one, other = steps_of(step_chunk(1, 3), step_chunk(2, 3, sigma=0.1, certainty=0.5))
    there, back = between([one], [other]), between([other], [one])
    assert [part.share for part in there.parts] == pytest.approx([part.share for part in back.parts])


def test_standard_errors_are_the_spread_over_dumps() -> None:
    sides = ((step_chunk(1, s, sequences=60), step_chunk(2, s, sigma=0.1, sequences=60)) for s in range(150))
    found = [decompose(steps_of(*chunks)).parts for chunks in sides]
    for parts in zip(*found, strict=True):
        spread = np.std([math.log(part.factor) for part in parts])
        assert spread == pytest.approx(np.mean([part.error for part in parts]), rel=0.25), parts[0].name


def test_steps_in_pieces_give_the_same_sums() -> None:
    chunk = step_chunk(4, 1)
    halves = [chunk.select_sequences(np.arange(200) % 2 == part) for part in (0, 1)]
    (whole,), (parts,) = steps_of(chunk), steps_of(*halves)
    assert parts[:-1] == pytest.approx(whole[:-1], rel=1e-12)
    weights = np.exp(np.add.reduceat(chunk.log_ratio, chunk.cu_seqlens[:-1]))
    assert whole.ess == pytest.approx(weights.sum() ** 2 / (200 * (weights**2).sum()))
    assert whole.reward == pytest.approx(chunk.sequences["reward"].mean())


def test_a_step_without_any_gap_has_no_decomposition() -> None:
    chunk = step_chunk(1, 1, sequences=5)
    assert decompose(steps_of(replace(chunk, log_mu=chunk.log_pi), step_chunk(2, 1))) is None
    assert decompose(steps_of(chunk)) is None


def wandering(random: np.random.Generator, steps: int, memory: float) -> np.ndarray:
    """An autoregressive series of normal law; a random walk with a memory of 1."""
    values = random.normal(size=steps)
    values[1:] *= math.sqrt(1 - memory**2) if memory < 1 else 1.0
    for t in range(1, steps):
        values[t] += memory * values[t - 1]
    return values


def binomial_error(rate: float, count: int) -> float:
    """4 standard errors of a measured rate."""
    return 4 * math.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize("steps", [12, 60])
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9])
def test_series_without_jumps_are_called_changed_in_five_percent_at_most(steps: int, memory: float) -> None:
    """Whatever the correlation of neighbours; at 0.9, the worst that is allowed for, in five percent."""
    series = 400
    random = [np.random.default_rng([seed, steps]) for seed in range(series)]
    rate = np.mean([find_changes(wandering(r, steps, memory), 0.05).tests[0] < 0.05 for r in random])
    assert rate <= 0.05 + binomial_error(0.05, series)
    if memory == 0.9:
        assert rate >= 0.05 - binomial_error(0.05, series)


def test_small_p_values_of_changes_are_as_rare_as_they_say() -> None:
    """Beyond the simulated series p-values are extrapolated; they must not be too small."""
    p_values = [find_changes(wandering(np.random.default_rng([7, i]), 24, 0.9), 1e-9).tests[0] for i in range(4000)]
    for level in (1e-2, 1e-3):
        assert np.mean(np.array(p_values) < level) <= level + binomial_error(level, 4000)


def test_planted_jumps_are_placed_exactly() -> None:
    levels = np.repeat([0.0, 2.0, 0.5], [30, 25, 40])
    found = find_changes(levels + 0.1 * np.random.default_rng(1).normal(size=levels.size), 1e-3)
    assert [jump.step for jump in found.jumps] == [30, 55]
    assert found.jumps[0].after == pytest.approx(2.0, abs=0.2)
    assert found.drift is None


def test_neither_a_steady_drift_nor_one_odd_step_is_a_jump() -> None:
    found = find_changes(0.05 * np.arange(60) + 0.2 * np.random.default_rng(1).normal(size=60), 0.01)
    assert not found.jumps and found.drift == pytest.approx(0.05, rel=0.1)
    values = 0.1 * np.random.default_rng(1).normal(size=40)
    values[20] = 5.0
    assert not find_changes(values, 0.01).jumps


@pytest.mark.parametrize("lag", [-3, 0, 2])
def test_the_lag_of_two_series_is_recovered(lag: int) -> None:
    random = np.random.default_rng(5)
    moves = np.cumsum(random.normal(size=110))
    other = np.roll(moves, lag) + 0.3 * random.normal(size=110)
    found = lead_lag("reward", moves[5:105], other[5:105])
    assert found.lag == lag and found.p < 0.01


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9, 1.0])
def test_unrelated_series_do_not_move_together(memory: float) -> None:
    """5 % have p < 0.05, whatever the correlation of neighbours."""
    alarms, series = 0, 300
    for seed in range(series):
        random = np.random.default_rng(seed)
        found = lead_lag("reward", wandering(random, 40, memory), wandering(random, 40, memory))
        alarms += found.p < 0.05
    assert abs(alarms / series - 0.05) <= binomial_error(0.05, series)


def test_series_that_only_grow_together_are_not_related() -> None:
    random = np.random.default_rng(3)
    assert lead_lag("reward", *(np.linspace(0, 8, 60) + random.normal(size=60) for _ in range(2))).p > 0.05


def test_short_or_constant_series_are_not_compared_and_one_that_is_predicted_exactly_has_no_relation() -> None:
    values = np.arange(float(FEWEST - 1))
    assert lead_lag("reward", values, values) is None
    assert lead_lag("reward", np.arange(50.0), np.ones(50)) is None
    assert lead_lag("reward", wandering(np.random.default_rng(0), 60, 0.5), np.arange(60) % 2.0).p == 1


def test_the_terminal_line_names_growth_cause_and_jump_which_the_picture_marks() -> None:
    found = diagnosed(*[step_chunk(s, 7, sigma=0.05 if s < 18 else 0.1, sequences=40) for s in range(10, 26)])
    assert [jump.step for jump in found.timeline.jumps] == [18]
    line = report_text.course(found)
    assert line.startswith("k3 grew")
    assert "from steps 10-13 to steps 22-25: engine 100" in line
    assert line.endswith("jump at step 18")
    assert over_steps(found).count(">jump</text>") == 1


def test_p_values_of_the_course_are_corrected_with_those_of_the_report() -> None:
    found = diagnosed(*[step_chunk(s, 7, sigma=0.05 if s < 18 else 0.3, sequences=30) for s in range(4, 32)])
    evidence, course = found.evidence, found.timeline
    names = {test.name for test in evidence.tests}
    assert {"jump of k3, split 0", "k3 with reward", "k3 with length", "z_rho of step 12"} <= names
    (jump,), (raw,) = course.jumps, evidence.course.jumps
    assert jump.p == evidence.adjusted["jump of k3, split 0"] > raw.p
    assert jump.p < 0.01


def test_a_surge_of_the_length_is_named_by_its_step_and_marked() -> None:
    found = diagnosed(*[step_chunk(s, 7, length=20 if s < 140 else 80, sequences=10) for s in range(100, 150)])
    course = found.timeline
    assert 140 <= course.surge.step <= 144 and not course.surge.in_warmup
    assert over_steps(found).count(">surge</text>") == 1


def test_the_log_beside_the_dump_adds_gradient_norms(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    records = [{"phase": "warmup", "step": 3, "grad_norm": 9.0}, {"phase": "rl", "step": 3, "grad_norm": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for path in (tmp_path / "dump", tmp_path / "dump" / "3.parquet"):
        path.touch() if path.suffix else None
        assert logged_next_to(path)["grad_norm"] == {3: 0.5}
    (tmp_path / "metrics.jsonl").write_text("[1]\n{}\n")
    assert logged_next_to(tmp_path / "dump") == {}


def test_what_is_not_known_is_named() -> None:
    chunks = [step_chunk(s, 7, sequences=5) for s in range(8)]
    bare = [replace(c, tokens={}, sequences={"step": c.sequences["step"]}) for c in chunks]
    course = timeline(steps_of(*bare), {"grad_norm": {0: 1.0}})
    assert set(course.missing) == {"reward", "entropy"}
    assert math.isnan(course.series["grad_norm"][1])


def test_json_holds_the_course_and_the_decomposition() -> None:
    found = json.loads(output.to_json(diagnosed(*(step_chunk(s, 7, sequences=12) for s in range(12)))))
    assert found["timeline"]["step"] == list(range(12))
    assert len(found["timeline"]["series"]["k3"]) == 12
    assert set(found["decomposition"]["parts"]) == {"engine", "entropy", "tail", "length"}
    short = json.loads(output.to_json(diagnosed(step_chunk(0, 7))))
    assert short["timeline"] is None and short["decomposition"] is None
