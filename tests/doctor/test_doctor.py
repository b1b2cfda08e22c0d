"""The registry of checks, how findings are printed, and what never leaves doctor."""

import io
import json
from pathlib import Path

import pytest
from doctor_facts import RECORDED, answer, good
from rich.console import Console

from megatron_rc import schema
from megatron_rc.doctor import display
from megatron_rc.doctor.registry import Check, Finding, Known, Registry, Undecided, error, warning, worst
from megatron_rc.doctor.registry import good as fine
from megatron_rc.doctor.server.examine import SGLANG
from megatron_rc.doctor.server.facts import read_trainer


def numbers() -> Registry[int]:
    registry: Registry[int] = Registry("number")

    @registry.check
    def is_small(number: int) -> Finding:
        """A number against 3."""
        if number == 0:
            raise Undecided("there is no number", "Give one.")
        if number > 9:
            return error(f"{number} is far too large", "Start again.")
        return fine(f"{number} is small") if number < 3 else warning(f"{number} is too large", "Take a smaller one.")

    return registry


@pytest.mark.parametrize(
    ("number", "finding"),
    [
        (1, ("good", "1 is small", "", True)),
        (5, ("warning", "5 is too large", "Take a smaller one.", True)),
        (10, ("error", "10 is far too large", "Start again.", True)),
        (0, ("note", "there is no number", "Give one.", False)),
    ],
)
def test_a_registry_serves_facts_of_any_kind(number: int, finding: tuple[str, str, str, bool]) -> None:
    (found,) = numbers().run(number)
    assert (found.status, found.found, found.fix, found.decided) == finding
    assert (found.check, found.compares) == ("is-small", "A number against 3")


def test_registries_join_in_order_and_refuse_a_name_twice() -> None:
    other: Registry[int] = Registry("other")
    other.add(Check("odd", "", lambda number: fine("odd")))
    assert [check.name for check in Registry("both", other, numbers())] == ["odd", "is-small"]
    with pytest.raises(AssertionError, match="two checks are called 'is-small'"):
        Registry("both", numbers(), numbers())


def test_a_fact_that_is_missing_is_named() -> None:
    with pytest.raises(Undecided, match="the server does not report dtype"):
        Known({}, "the server")["dtype"]
    with pytest.raises(Undecided, match="the server is not known"):
        Known(None, "the server").get("dtype")


def test_the_worst_finding_decides() -> None:
    findings = [Finding("a", "note", ""), Finding("b", "error", ""), Finding("c", "warning", "")]
    assert worst(findings) == "error"
    assert worst([*findings[:1], *findings[2:]]) == "warning"
    assert worst([]) == "good"


FINDINGS = [
    Finding("fits", "good", "all of it fits"),
    Finding("seeds", "note", "seeds are ignored", "Add --seeds."),
    Finding("first", "note", "the trainer is not known", "Give --config.", decided=False),
    Finding("second", "note", "the trainer is not known", "Give --config.", decided=False),
    Finding("dtype", "warning", "the server computes in [bf16]", "Add --dtype float32."),
    Finding("vocabulary", "error", "37 ids and 41", "Serve the other."),
]


def printed(terminal: bool, findings: list[Finding] = FINDINGS, passed: bool = False) -> str:
    said = io.StringIO()
    console = Console(file=said, force_terminal=terminal, width=100, highlight=False, color_system=None)
    display.show("SGLang server http://a:1", findings, console=console, passed=passed)
    return said.getvalue()


def test_plain_output_has_the_gravest_first_and_joins_what_lacks_the_same_fact() -> None:
    assert printed(terminal=False).splitlines() == [
        "SGLang server http://a:1: 1 error, 1 warning, 3 notes, 1 good",
        "error   vocabulary: 37 ids and 41.",
        "        fix: Serve the other.",
        "warning dtype: the server computes in [bf16].",
        "        fix: Add --dtype float32.",
        "note    seeds: seeds are ignored.",
        "        fix: Add --seeds.",
        "note    first, second: not decided: the trainer is not known.",
        "        fix: Give --config.",
        "1 check passed: all of it fits",
    ]


def test_many_checks_that_pass_or_lack_the_same_fact_are_counted() -> None:
    many = [Finding(f"check-{n}", "good", "it is as it must be") for n in range(9)]
    assert printed(False, many).splitlines()[1:] == ["9 checks passed"]
    names = ", ".join(finding.check for finding in many[:3])
    assert f"good    {names}: it is as it must be.\n" in printed(False, many[:3], passed=True)
    missing = [Finding(f"check-{n}", "note", "no host", decided=False) for n in range(4)]
    assert printed(False, missing).splitlines()[1:] == ["note    4 checks: not decided: no host."]


def test_the_subject_with_errors_comes_first() -> None:
    said = io.StringIO()
    found = {"libraries": [Finding("apex", "warning", "another apex")], "host slime": FINDINGS}
    display.show_all(found, console=Console(file=said, width=100))
    assert said.getvalue().index("error   vocabulary") < said.getvalue().index("warning apex")


def test_a_terminal_shows_the_same_findings_in_a_table() -> None:
    said = printed(terminal=True)
    rows = [line.split()[0] for line in said.splitlines()[2:] if not line.startswith(" ")]
    assert rows == ["error", "warning", "note", "note", "1"]
    assert "[bf16]" in said and "fix: Give --config." in said


def test_json_holds_every_finding() -> None:
    read = json.loads(display.to_json({"a": FINDINGS}))
    assert [Finding(**fields) for fields in read["a"]] == FINDINGS


def test_no_token_of_a_prompt_or_an_answer_is_printed() -> None:
    secret = 987654321
    facts = good()
    for probe in ("plain", "truncated"):
        asked = facts.server.probes[probe].meta
        entries = [[-1.0, secret, None] for _ in asked["output_token_logprobs"]]
        kept = [[secret]] * 8
        facts = answer(probe, [secret] * 8, output_token_logprobs=entries, output_token_sampling_mask=kept)(facts)
        for case in (facts, answer(probe, [secret] * 7)(facts)):
            findings = SGLANG.run(case)
            assert str(secret) not in display.to_json({"a": findings}) + printed(False, findings)


def test_the_trainer_is_read_from_its_yaml_with_its_longest_prompt(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    model = {k: v for k, v in RECORDED["good_moe"]["model_config"].items() if k != "architectures"}
    fields = {"model": {"config": model}, "rollout": {"top_k": 8}, "correction": "token-tis",
              "task": {"options": {"levels": {"2x1": 1.0}, "held_out": 3}}}  # fmt: skip
    config.write_text(schema.dump_yaml(fields))
    facts = read_trainer(config, None)
    assert facts.truncates and facts.longest_prompt == len("6-3=")
    changed = read_trainer(config, None, ["rollout.top_k=-1", "task.options.levels={3x1: 1.0}"])
    assert not changed.truncates and changed.longest_prompt == len("6-3+2=")
    assert facts.config["num_experts"] == 8 and facts.stop_token_ids
