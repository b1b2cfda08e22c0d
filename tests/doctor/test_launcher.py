"""A launcher in Python is read without being run: what it passes for sure, what perhaps, and what cannot be known."""

import os
from pathlib import Path

import pytest

from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.host.script import read_script

LAUNCHER = r"""
from dataclasses import dataclass
import command_utils as U

raise SystemExit("it was run")
LR = "1e-6"

@dataclass
class Recipe:
    fp8: bool = False

@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    model_name: str = "Qwen3-4B"
    run_id: str = U.create_run_id()
    backend: Literal["fsdp", "megatron"] = "megatron"
    fp8: bool = False
    num_nodes: int = 1

    def __post_init__(self):
        self.tensor = 1 if self.model_name == "Qwen3-0.6B" else 2 * self.num_nodes
        self.pipeline = U.guess(self.model_name)

def execute(args: ScriptArgs):
    ckpt_args = f"--save /out/{args.run_id} " f"--save-interval {2 if args.fp8 else 19 + args.num_nodes} "
    if args.fp8:
        ckpt_args += "--fp8-format e4m3 "
    if args.recipe.fp8:
        ckpt_args += "--use-tis "
    else:
        ckpt_args += "--no-tis "
    match args.backend:
        case "fsdp":
            perf_args = "--train-backend fsdp "
        case "torch" | "jax":
            perf_args = "--no-megatron "
        case "megatron":
            perf_args = f"--tensor-model-parallel-size {args.tensor} --pipeline-model-parallel-size {args.pipeline} "
        case _:
            raise NotImplementedError
    perf_args += f"{'--sequence-parallel ' if args.tensor > 1 and not args.fp8 else ''}"
    perf_args += f"{'--colocate ' if U.colocated() else ''}"
    perf_args += "--fp16 " if args.fp8 < "x" or args.num_nodes // 0 or "-" * 10**18 == args.run_id else ""
    train_args = (
        f"{ckpt_args} "
        f"{U.get_default_wandb_args(__file__)} "
        f"{perf_args} "
        f"--lr {LR} --apply-chat-template-kwargs '{{\"enable_thinking\": false}}' "
        MORE
    )
    U.execute_train(train_args=train_args, config=args, megatron_model_type=MODEL)
"""
MODEL = """
def model_args(base: str | None = None) -> str:
    base = base if base is not None else os.environ.get("BASE")
    return "--num-layers 36 " f"--rotary-base {base} " "--swiglu "
"""


def launcher(folder: Path, more: str = "", model: str = '"qwen3-4B"') -> Path:
    (folder / "models").mkdir()
    (folder / "models/qwen3-4B.py").write_text(MODEL)
    (path := folder / "run.py").write_text(LAUNCHER.replace("MORE", more).replace("MODEL", model))
    return path


def test_flags_follow_fields_branches_and_the_file_of_the_model(tmp_path: Path) -> None:
    script = read_script(launcher(tmp_path))
    assert script.words == [
        "python", "train.py", "--save", "/out/${args_run_id}", "--save-interval", "20",
        "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "${args_pipeline}",
        "--sequence-parallel", "--lr", "1e-6", "--apply-chat-template-kwargs", '{"enable_thinking": false}',
        "--num-layers", "36", "--rotary-base", "${base}", "--swiglu",
    ]  # fmt: skip
    assert script.maybe == ["--use-tis", "--no-tis", "--colocate", "--fp16"]
    flags = Flags.of_file(tmp_path / "run.py")
    assert not flags.hidden and "sequence-parallel" in flags and "fp8-format" not in flags


@pytest.mark.parametrize(
    ("more", "model", "hidden"),
    [('f"{U.plan(args)}"', '"qwen3-4B"', "${U_plan_args}"), ("", "args.megatron_model_type", "${MODEL_ARGS}")],
)
def test_flags_that_a_program_computes_may_hide_any_flag(more: str, model: str, hidden: str, tmp_path: Path) -> None:
    flags = Flags.of_file(launcher(tmp_path, more, model))
    assert flags.hidden == (hidden,)


@pytest.mark.parametrize("text", ["U.execute_train(", 'def f():\n  U.execute_train(train_args="--lr \'1")'])
def test_a_launcher_that_cannot_be_read_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(text)
    with pytest.raises(ValueError, match=r"run\.py cannot be read as a launcher: "):
        read_script(tmp_path / "run.py")


@pytest.mark.skipif(not os.environ.get("MILES_DIR"), reason="MILES_DIR names no source tree of miles")
def test_every_launcher_of_miles_is_read() -> None:
    files = [*Path(os.environ["MILES_DIR"], "scripts").rglob("run_*.py")]
    assert len(files) > 30
    for file in files:
        words = read_script(file).words
        assert len(words) > 60 and words[0] == "python" and "--rollout-batch-size" in words, file
