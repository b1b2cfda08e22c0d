"""The command `megatron-rc analyze`, of one dump or two: one sentence for what is wrong, one screen, worst tokens."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from host_batches import HOST_DUMPS
from refusals import Ended, refuses, run
from simulated_dumps import TRAPS, diagnosed, honest, small_honest, world, write_dump

from megatron_rc.analyze import output, terminal
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.comparison import NOISE, Comparison, compare
from megatron_rc.analyze.conditions import Outcome
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.rules import RULES, Judgement
from megatron_rc.analyze.rules.rule import HOSTS
from megatron_rc.exit_status import ExitStatus

RESPONSES, LENGTH = 24, 30


def columns(**changes: Any) -> dict[str, Any]:
    """An honest dump, with some columns replaced; None leaves one out."""
    random = np.random.default_rng(1)
    log_pi = np.log(random.uniform(0.05, 1, (RESPONSES, LENGTH)))
    log_mu = np.minimum(log_pi + 0.01 * random.normal(size=log_pi.shape), 0)
    plain = {"old_logprobs": log_pi.tolist(), "rollout_logprobs": log_mu.tolist(), "step": [1] * RESPONSES}
    return {name: values for name, values in {**plain, **changes}.items() if values is not None}


def dump(folder: Path, **changes: Any) -> Path:
    path = folder / "dump.parquet"
    pq.write_table(pa.table(columns(**changes)), path)
    return path


def analyze(*arguments: str | Path) -> Ended:
    return run("analyze", "--no-html", *arguments)


NO_LISTS = pa.array([], pa.list_(pa.float64()))
UNUSABLE: dict[str, dict[str, Any]] = {
    "no rows": {"old_logprobs": NO_LISTS, "rollout_logprobs": NO_LISTS, "step": None},
    "texts": {"old_logprobs": [["a"] * LENGTH] * RESPONSES},
    "no lists": {"old_logprobs": [1.0] * RESPONSES, "rollout_logprobs": [1.0] * RESPONSES},
    "only NaN": {"old_logprobs": [[float("nan")] * LENGTH] * RESPONSES},
    "other lengths": {"old_logprobs": [[-1.0] * (LENGTH - 1)] * RESPONSES},
    "one side": {"rollout_logprobs": None},
}


@pytest.mark.parametrize("changes", UNUSABLE.values(), ids=UNUSABLE)
def test_a_dump_without_a_usable_response_is_one_sentence(changes: Any, tmp_path: Path) -> None:
    assert (ended := analyze(dump(tmp_path, **changes))).is_refusal(), ended


@pytest.mark.parametrize(
    "options",
    [
        ("--require", "speed<1"), ("--require", "k3<fast"), ("--require", "k3"), ("--require", "RC2=some"),
        ("--require", "RC9=none"), ("--require", "RC1o2=none"), ("--precision", "bf8"), ("--model-kind", "sparse"),
        ("--require", ","), ("--select", "RC999"), ("--ignore", "203"), ("--host", "trl2"), ("--rule", "absent.py"),
        ("--baseline", __file__), ("--tokenizer", __file__), ("--tokenizer", "absent"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_sentence_before_the_dump_is_read(options: tuple[str, str], tmp_path: Path) -> None:
    ended = analyze(tmp_path / "absent", *options, "--require-format", "junit")
    assert ended.is_refusal() and str(tmp_path) not in ended.stderr, ended


def test_a_condition_that_the_dump_cannot_answer_is_one_sentence(tmp_path: Path) -> None:
    ended = analyze(dump(tmp_path), "--require", "z_W<4", "--require-format", "junit")
    assert ended.is_refusal("needs the column entropy"), ended


@pytest.mark.parametrize(
    "changes",
    [
        {"step": [None] * RESPONSES},
        {"step": ["a"] * RESPONSES},
        {"step": [float("nan")] * RESPONSES},
        {"step": list(range(RESPONSES)), "reward": [float("nan")] * RESPONSES},
        {"entropy": [[float("nan")] * LENGTH] * RESPONSES},
        {"entropy": [1.0] * RESPONSES},
        {"server": ["<script>\x1b[31m"] * RESPONSES},
        {"reward": ["good"] * RESPONSES},
    ],
)
def test_odd_columns_are_no_reason_to_stop_or_are_refused(changes: Any, tmp_path: Path) -> None:
    ended = analyze(dump(tmp_path, **changes))
    assert ended.is_refusal() or (ended.status == 0 and ended.stdout and "\x1b[31m" not in ended.stdout), ended


def test_json_has_null_for_every_number_that_is_not_finite(tmp_path: Path) -> None:
    ended = analyze(dump(tmp_path, rollout_logprobs=columns()["old_logprobs"]), "--json")
    found = json.loads(ended.stdout, parse_constant=pytest.fail)
    assert found["growth"]["horizon"] is None
    assert ended.status == 0 and found["honesty"]["exact"] == 1


def test_the_exit_status_says_whether_the_conditions_hold(tmp_path: Path) -> None:
    path = dump(tmp_path)
    assert analyze(path, "--require", "k3<1e-2, damaged<=0").status == 0
    ended = analyze(path, "--require", "k3<1e-2, k3<1e-9")
    assert ended.status == ExitStatus.WRONG and "fails k3<1e-9" in ended.stdout


def test_what_is_shared_names_no_server_in_the_answers_of_conditions(tmp_path: Path) -> None:
    path = write_dump(TRAPS["one stale server"][1](world(1, sequences=48)), tmp_path / "dump.parquet")
    for form in ("text", "junit", "github"):
        shown, shared = (
            analyze(path, "--require", "RC3=none", "--require-format", form, *more) for more in ((), ("--share",))
        )
        assert shown.status == shared.status == ExitStatus.WRONG
        assert "server c has" in shown.stdout and "RC303 (BUG)" in shared.stdout
        assert "server c" not in shared.stdout.lower()


@pytest.mark.parametrize(
    ("written", "said"),
    [(None, "FileNotFoundError"), ("{", "JSONDecodeError"), ("{}", "KeyError"), ('{"noise": -1}', "must be a number")],
)
def test_a_floor_that_cannot_be_read_is_one_sentence(written: str | None, said: str, tmp_path: Path) -> None:
    floor = tmp_path / "floor.json"
    if written is not None:
        floor.write_text(written)
    ended = analyze(dump(tmp_path), "--floor", floor)
    assert ended.is_refusal() and "--floor" in ended.stderr and said in ended.stderr, ended


def test_a_mask_of_zeros_and_probabilities_in_place_of_logs_are_called_that(tmp_path: Path) -> None:
    masked = analyze(dump(tmp_path, loss_mask=[[0] * LENGTH] * RESPONSES))
    assert f"the loss mask is 0 at all {RESPONSES * LENGTH} tokens of {RESPONSES} responses" in masked.stderr
    positive = analyze(dump(tmp_path, rollout_logprobs=[[0.5] * LENGTH] * RESPONSES))
    assert f"{RESPONSES} with log-probs above 0 (are they probabilities, or -log p?)" in positive.stderr


def test_junit_parses_and_names_the_failure(tmp_path: Path) -> None:
    ended = analyze(dump(tmp_path), "--require", "k3<1e-9, k3<1", "--require-format", "junit")
    suite = ElementTree.fromstring(ended.stdout)
    assert (ended.status, suite.get("tests"), suite.get("failures")) == (ExitStatus.WRONG, "2", "1")
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["k3<1e-9"]


def test_annotations_stay_on_one_line_whatever_they_say() -> None:
    outcome = Outcome("RC2=none", False, "100 %\n::error::planted\r<a&b>\x00\x1b")
    (line,) = output.github([outcome]).splitlines()
    assert line.startswith("::error title=megatron-rc analyze::100 %25%0A::error::planted%0D")
    failure = ElementTree.fromstring(output.junit([outcome])).find("testcase/failure")
    assert "<a&b>" in str(failure.get("message"))


@pytest.mark.parametrize(("source", "options"), [(None, []), (HOST_DUMPS / "miles", ["--no-what-if", "--json"])])
def test_an_analysis_without_what_if_imports_no_torch(source: Path | None, options: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_rc import cli\n"
        f"sys.argv = ['megatron-rc', 'analyze', {str(source or dump(tmp_path))!r}, *{options}]\n"
        "try:\n    cli.main()\nexcept SystemExit as stopped:\n    assert not stopped.code, stopped.code\n"
        # pyarrow loads pandas where it is installed
        "heavy = {'torch', 'scipy', 'statsmodels', 'megatron', 'transformers'}\n"
        "assert not heavy & {name.partition('.')[0] for name in sys.modules}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


def line(found: Comparison, name: str) -> tuple[float, float, float]:
    one = next(line for line in found.lines if line.name == name)
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


SCREEN = 40
SOURCE = "/data/runs/qwen3-30b-a3b/dump/rollouts-000123.parquet"


def truncated() -> Diagnosis:
    return diagnosed(TRAPS["renormalised top-p .95"][1](world(1, sequences=32)), source=SOURCE)


def test_the_summary_fits_one_screen_when_everything_is_wrong() -> None:
    diagnosis = truncated()
    (verdict,) = diagnosis.verdicts
    more = [replace(verdict, code=code, p=1e-9, share=0.5) for code in ("RC303", "RC301", "RC104")]
    evidence = replace(diagnosis.evidence, damaged={"nan": 3, "positive": 4}, damaged_places=[1, 2, 3, 4, 5])
    missing = {code: list(rule.needs) for code, rule in RULES.items() if rule.needs}
    worst = replace(
        diagnosis,
        evidence=replace(evidence, columns=frozenset()),
        judgement=Judgement([verdict, *more], missing, {"RC205": "RC102", "RC501": "RC102"}, []),
        corrupt=CorruptRows(9, 2, [f"{SOURCE}, row 17: old_logprobs has 3 values, rollout_logprobs has 4"]),
        ignored=["3 files of no known format are not read, such as notes.txt", "1 file of slime is not read"],
    )
    text = terminal.text(worst)
    assert len(text.splitlines()) <= SCREEN, text
    said = ("9 corrupt rows; 2 damaged files", "row 17", "notes.txt", "nan (3), positive (4) log-probs")
    assert [words for words in said if words not in text] == []


def test_fixes_are_named_by_their_command_or_printed_for_one_codebase() -> None:
    diagnosis = truncated()
    assert "Fixes: megatron-rc explain RC102" in terminal.text(diagnosis)
    assert not [host for host in HOSTS if f"{host}:" in terminal.text(diagnosis)]
    text = " ".join(terminal.text(diagnosis, host="TRL").split())
    assert f"RC102 in TRL: {diagnosis.verdicts[0].page.fixes['TRL']}" in text
    refuses("unknown codebase 'trl2'; known: verl, slime", terminal.host_named, "trl2")
    assert terminal.host_named("megatron-lm") == "Megatron-LM"
    refuses("dumps of prime-rl are read, but no fixes are written for it; known: verl", terminal.host_named, "prime-rl")


WORDS, ANSWERS = 24, 40
WORST = 17


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose ids are words, and a dump in which word 17 of response 3 is much less likely to the trainer."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(WORDS)} | {"\x1b[31m": WORDS, "?": WORDS + 1}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    random, size = np.random.default_rng(1), ANSWERS * WORDS
    log_pi = np.log(random.uniform(0.2, 0.9, size))
    log_mu = np.minimum(log_pi + 0.01 * random.standard_normal(size), 0)
    log_mu[3 * WORDS + WORST], log_pi[3 * WORDS + WORST] = np.log(0.5), np.log(0.01)
    ids = np.tile(np.arange(WORDS), ANSWERS)
    ids[3 * WORDS + WORST - 1] = WORDS
    chunk = Chunk(log_pi, log_mu, np.arange(ANSWERS + 1) * WORDS, {"token_id": ids}, {"step": np.zeros(ANSWERS, int)})
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
