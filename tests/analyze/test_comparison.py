"""Two dumps compared: chance is no change, a doubled noise is, and a finding that appears fails a pipeline."""

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import run
from simulated_dumps import TRAPS, diagnosed, honest, small_honest, world, write_dump

from megatron_rc.analyze.comparison import NOISE, Comparison, compare
from megatron_rc.exit_status import ExitStatus


def line(found: Comparison, name: str) -> tuple[float, float, float]:
    one = next(line for line in found.lines if line.name == name)
    assert one.p is not None
    return one.before, one.after, one.p


def test_two_dumps_of_one_engine_differ_by_chance_alone() -> None:
    pairs = 200
    low, worse = np.zeros(3), 0
    for seed in range(pairs):
        found = compare(*(diagnosed(small_honest(2 * seed + side, length=40)) for side in (0, 1)))
        # uncorrected, the smallest of three tests would be below 0.05 in 14 %
        low += [line(found, name)[2] < 0.05 for name in ("k3", NOISE, "mean ratio")]
        worse += any(one.worse for one in found.lines)
    assert worse / pairs <= 0.01 + 4 * np.sqrt(0.01 * 0.99 / pairs)
    assert (low / pairs <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / pairs)).all(), low


def test_a_doubled_noise_is_worse_and_the_way_back_is_not() -> None:
    one, two = (diagnosed(honest(world(seed, noise, 48))) for seed, noise in ((1, 0.03), (2, 0.06)))
    found = compare(one, two)
    before, after, p = line(found, NOISE)
    assert found.worse and after / before == pytest.approx(2, rel=0.1) and p < 1e-6
    assert not compare(two, one).worse


def test_a_policy_that_is_less_sure_is_not_a_noisier_engine() -> None:
    sides = [world(seed, sequences=48) for seed in (1, 2)]
    for w, sharpness in zip(sides, (4.0, 0.5), strict=True):
        w.noisy += (sharpness - 1) * w.logits
        w.logits *= sharpness
    found = compare(*(diagnosed(honest(w)) for w in sides))
    before, after, p = line(found, "k3")
    assert after > 1.2 * before and p < 0.01
    before, after, _ = line(found, NOISE)
    assert after == pytest.approx(before, rel=0.1)


def test_the_command_fails_where_a_finding_appears_and_hides_what_it_names(tmp_path: Path) -> None:
    names = {"good": "honest", "bad": "one stale server"}
    good, bad = (write_dump(TRAPS[t][1](world(1, sequences=48)), tmp_path / f"{n}.parquet") for n, t in names.items())
    ended = run("analyze", good, bad)
    assert (
        ended.status == ExitStatus.WRONG and "WORSE: RC303 appeared" in ended.stdout and "server c has" in ended.stdout
    )
    shared = run("analyze", good, bad, "--share", "--json")
    told = json.loads(shared.stdout)
    assert shared.status == ExitStatus.WRONG and [one["code"] for one in told["appeared"]] == ["RC303"]
    assert "server c" not in shared.stdout
    back = run("analyze", bad, good)
    assert back.status == 0 and "Went: RC303" in back.stdout and not (tmp_path / "analysis.html").exists()


@pytest.mark.parametrize("option", [("--require", "k3<1"), ("--rc", "rc.yaml"), ("--what-if",), ("--host", "verl")])
def test_an_option_for_one_dump_is_refused_with_two(option: tuple[str, ...], tmp_path: Path) -> None:
    path = write_dump(honest(world(1, sequences=8)), tmp_path / "dump.parquet")
    ended = run("analyze", path, path, *option)
    assert ended.is_refusal() and f"{option[0]} goes with one dump" in ended.stderr
