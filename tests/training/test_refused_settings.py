"""Settings of a job that cannot act together, or at all, are refused by name when the job starts."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses

from megatron_rc.jobs.describe import describe
from megatron_rc.settings import combinations
from megatron_rc.settings import job as settings
from megatron_rc.settings.job import JobSettings
from megatron_rc.settings.train import TrainSettings

ROOT = Path(__file__).parents[2]


def check(text: str, **start: Any) -> None:
    combinations.check(settings.load(text), **start)


REFUSED = [
    ("{train: {asynchronous: 1}, rollout: {engine: recorded, recorded_path: dump}}",
     "^train.asynchronous must be 0 when rollout.engine is 'recorded': "),
    ("{train: {asynchronous: 1}, rollout: {lag: 2}}",
     "^rollout.lag must be 0 with train.asynchronous, got 2: "),
    ("{train: {keep_sampling_weights: true}, correction: {old: current}}",
     "^correction.old must be 'recompute' with train.keep_sampling_weights, got"),
    ("{train: {keep_sampling_weights: true}, rollout: {engine: recorded, recorded_path: dump}}",
     "^train.keep_sampling_weights must be false when rollout.engine is 'recorded': "),
    ("{correction: {weight: {upper: 1.5, staleness_upper: 1.3}, old: current}}",
     "staleness_upper must be null when old is 'current'"),
    ("{correction: cispo, loss: {surrogate: ppo}}", "^surrogate must be 'cispo', that of the correction, got"),
    ("{correction: token-tis, train: {control: random-mask}}", "'random-mask' for a correction that drops nothing"),
    ("{correction: none, train: {control: mean-weight}}", "'mean-weight' for a correction without weight and"),
    ("{correction: {preset: seq-mis, old: rollout}, loss: {surrogate: reinforce}, train: {control: random-mask}}",
     "train.control must be 'none' when correction.old is 'rollout'"),
    ("{correction: centered}",
     "rollout.top_logprobs must be at least 1 when correction.centering is 'top'"),
    ("{correction: centered, rollout: {top_logprobs: 4, top_p: 0.9}}",
     "correction.centering must be 'support' where rollout.top_p or rollout.top_k keeps some ids"),
    ("{correction: {centering: support, old: current}, rollout: {top_logprobs: 4}}",
     "'top' where all are kept, got 'support'"),
    ("{correction: {old: current}, train: {mini_batches_per_rollout: 2}}",
     "train.mini_batches_per_rollout must be 1 when correction.old is 'current'"),
    ("{correction: {preset: standardized, old: current}}",
     "reject must not use 'standardized' in a job whose correction.old is 'current'"),
    ("dump: {keep: 0, tokens: true}", "tokens must be false when keep is 0"),
    ("dump: {keep: -1}", "keep must be >= 0"),
    ("dump: {max_bytes: 1000}", "max_bytes must be >= 1048576"),
    ("dump: {kept_mass: true}", "dump.kept_mass needs rollout.top_p below 1"),
    ("{correction: {preset: token-tis, old: current}, dump: {kept_mass: true}}",
     "dump.kept_mass needs correction.old='recompute'"),
    ("{rollout: {engine: sglang}, train: {eval_weights: trained}}",
     "^train.eval_weights must be 'served' when rollout.engine is 'sglang'"),
    ("{correction: {old: current}, loss: {denominator: kept}}",
     "^loss.denominator must be 'original' when correction.old is 'current': "),
    ("{correction: {old: current}, moe: {replay: R2}}",
     "^correction.old must be 'recompute' when moe.replay is 'R2', which replays .* got 'current'$"),
    ("{correction: {reject: [{statistic: route_shift, upper: 1}]}, moe: {replay: R3}}",
     "needs moe.record=true and correction.old='recompute': .* got False and 'recompute'$"),
    ("{correction: {reject: [{statistic: route_shift, upper: 1}], old: current}, moe: {record: true}}",
     "needs moe.record=true and correction.old='recompute': .* got True and 'current'$"),
    ("{correction: {preset: token-tis, old: current}, dump: {varentropy: true}}",
     "dump.varentropy needs correction.old='recompute'"),
    ("train: {head_chunk: 256}", "head_chunk must be null with head 'logits', which makes all logits, got 256"),
    ("train: {head_logits_dtype: fp32}", "head_logits_dtype must be null with head 'logits'"),
    ("train: {head: linear, head_logits_dtype: bf16}", "train.head_logits_dtype: Input should be 'fp32', got 'bf16'"),
    ("train: {head: linear, head_chunk: 0}", "head_chunk must be >= 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_what_cannot_act_is_refused_by_name(text: str, sentence: str) -> None:
    refuses(sentence, check, text)


def test_the_same_settings_are_taken_where_they_act() -> None:
    for alone in ("engine: recorded, recorded_path: dump", "lag: 2"):
        check(f"rollout: {{{alone}}}")
    check("correction: {old: current}")
    check("dump: {keep: 0, varentropy: true}")
    check("{correction: token-tis, train: {control: mean-weight}}")
    check("train: {control: none}", ranks=2)


STARTED = [
    ("dump: {keep: 0, varentropy: true}", {"every_step": False}, "dump.varentropy must be false when dump.keep is 0"),
    ("{dump: {keep: 0, kept_mass: true}, rollout: {top_k: 2}}", {"every_step": False}, "dump.kept_mass must be false"),
    ("{correction: token-tis, train: {control: mean-weight}}", {"ranks": 2}, "with 2 data-parallel ranks: "),
]


@pytest.mark.parametrize(("text", "start", "sentence"), STARTED)
def test_what_cannot_act_when_a_job_starts_this_way_is_refused(text: str, start: Any, sentence: str) -> None:
    check(text)
    refuses(sentence, check, text, **start)


def test_every_row_of_the_combinations_is_refused_by_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = combinations.COMBINATIONS
    examples: list[Any] = [*((text, {}, said) for text, said in REFUSED), *STARTED]
    for row in rows:
        monkeypatch.setattr(combinations, "COMBINATIONS", [other for other in rows if other is not row])
        missed = 0
        for text, start, sentence in examples:
            try:
                check(text, **start)
                missed += 1
            except ValueError as error:
                missed += not re.search(sentence, str(error))
        assert missed, f"no example needs {row.sentence!r}"


NOT_OF_SETTINGS_ALONE = {
    "folder._branch_off": "judges what another run has left",
    "routing.moe_shape": "the model has no experts",
    "send_disk.__init__": "a job fills the folder in; an engine of another caller may lack it",
    "verdicts.check": "judges the jobs of a grid together",
}
"""Functions with a sentence that names two settings but judges something else."""


def test_no_module_that_runs_a_job_refuses_two_settings_itself() -> None:
    """A sentence that names two settings belongs to the list, which nobody can forget to call."""
    names = "|".join(re.escape(field.name) for field in describe(JobSettings) if "." in field.name)
    paths = [path for room in ("training", "jobs", "rollout") for path in (ROOT / "megatron_rc" / room).rglob("*.py")]
    nodes = [(path.stem, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    found = set()
    for file, function in nodes:
        if not isinstance(function, ast.FunctionDef):
            continue
        inside = [node for statement in function.body for node in ast.walk(statement)]
        texts = [str(node.value) for node in inside if isinstance(node, ast.Constant)]
        texts = texts[1:] if ast.get_docstring(function) else texts
        if any(isinstance(node, ast.Raise) for node in inside) and len(set(re.findall(names, " ".join(texts)))) > 1:
            found.add(f"{file}.{function.name}")
    assert found == set(NOT_OF_SETTINGS_ALONE)


def test_a_dtype_of_the_head_is_refused_also_where_python_makes_the_settings() -> None:
    with pytest.raises(ValueError, match="head_logits_dtype must be 'fp32' or null, got 'bf16'"):
        TrainSettings(head="linear", head_logits_dtype="bf16")  # type: ignore[arg-type]
