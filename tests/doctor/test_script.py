"""What doctor reads in flags, launch scripts and launchers in Python: plain variables, and what stays open."""

import os
from pathlib import Path

import pytest

from megatron_rc.doctor.host.flags import Arguments, Flags
from megatron_rc.doctor.host.script import read_script
from megatron_rc.doctor.registry import Undecided
from megatron_rc.models.hf_checkpoint import read_checkpoint

SCRIPT = """#!/bin/bash
set -ex
COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/moe.sh"   # MODEL_ARGS
lr=${LR:-1e-6}
quantization=${QUANTIZATION:-}
export MODE=fast
ROLLOUT=(
   --rollout-temperature 0.8
   #--rollout-top-p 0.9
   --sizes 1 2 $(seq 16 8 256)
)
MAYBE=()
OFF=(--off 1)
if [ "$COUNT" -gt 0 ]; then
   MAYBE=(--rollout-top-k 50)
fi
if [ "${MODE}" = slow ]; then
   ROLLOUT+=(--slow)
else
   ROLLOUT+=(--fast)
fi
if [ -n "$quantization" ]; then OFF+=(--fp8); fi
ray start --head --address $MASTER
ray job submit -- python3 train.py --lr ${lr} --load "$CKPT" ${MODEL_ARGS[@]} ${ROLLOUT[@]} "${MAYBE[@]}" ${OFF[@]} "$@"
echo done
"""


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/moe.sh").write_text("N=128\nMODEL_ARGS=(\n  --num-experts ${N}\n)\n")
    (tmp_path / "run.sh").write_text(SCRIPT)
    return Flags.of_file(tmp_path / "run.sh")


def test_plain_variables_sourced_files_and_decided_branches_are_followed(flags: Flags) -> None:
    assert flags.words[:5] == ("ray", "job", "submit", "--", "python3")
    for name, value in {"num-experts": "128", "lr": "1e-6", "rollout-temperature": "0.8", "off": "1"}.items():
        assert flags.text(name, "") == value
    assert "fast" in flags and "slow" not in flags and "fp8" not in flags and not flags.hidden
    assert flags.variables["MODE"] == "fast" and "COUNT" not in flags.variables


def test_what_an_unknown_branch_sets_and_a_variable_of_elsewhere_are_undecided(flags: Flags) -> None:
    arguments = Arguments(flags, {"rollout_top_k": -1, "rollout_top_p": 1.0, "load": None}, None)
    assert arguments.rollout_top_p == 1.0
    with pytest.raises(Undecided, match="--rollout-top-k is in a branch"):
        _ = arguments.rollout_top_k
    with pytest.raises(Undecided, match=r"--load is \$CKPT"):
        _ = arguments.load


def test_a_flag_that_an_unknown_list_may_hold_is_undecided(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("source $HERE/model.sh\npython train.py --lr 1 ${MODEL_ARGS[@]} --data $HERE/x.jsonl\n")
    arguments = Arguments(Flags.of_file(file), {"lr": 0.0, "num_experts": None, "use_tis": False}, None)
    assert arguments.lr == 1.0
    for name in ("num_experts", "use_tis"):
        with pytest.raises(Undecided, match=r"MODEL_ARGS\[@\]"):
            getattr(arguments, name)


@pytest.mark.parametrize("path", ["$HERE/x.jsonl", "${HERE}/x.jsonl", "'# no comment'"])
def test_nothing_hides_in_a_list_that_no_line_fills_nor_in_a_path_behind_a_variable(path: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"# don't\npython train.py --lr 1 ${{EVAL_ARGS[@]}} --eval-prompt-data aime {path}\n")
    flags = Flags.of_file(file)
    assert not flags.hidden and Arguments(flags, {"num_experts": None}, None).num_experts is None
    for filled in ("mapfile -t EVAL_ARGS < args.txt", "source $ELSEWHERE/args.sh", 'eval "$(python a.py)"'):
        file.write_text(f"{filled}\npython train.py --lr 1 ${{EVAL_ARGS[@]}}\n")
        assert Flags.of_file(file).hidden == ("${EVAL_ARGS[@]}",)


@pytest.mark.parametrize(
    ("name", "is_moe"),
    [("openai/gpt-oss-20b", True), ("zai-org/GLM-4.6", True), ("MiniMaxAI/MiniMax-M2.5", True), ("tencent/Hy3", True),
     ("a/Gemma_4_26B_A4B", True),
     ("deepseek-ai/DeepSeek-V2-Lite", True), ("deepseek-ai/DeepSeek-R1", True), ("Qwen/Qwen3-Coder-Next", True),
     ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", False), ("Qwen/Qwen3-8B", False), ("meta-llama/Llama-3.1-8B", False),
     ("zai-org/glm-4-9b-chat", False), ("google/gemma-3-27b-it", False)],
)  # fmt: skip
def test_experts_are_known_by_the_name_of_a_model(name: str, is_moe: bool) -> None:
    assert read_checkpoint(name, Path("none")).is_moe == is_moe


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=1\nA=2\npython a.py $A", "2"),
        ("A=1\nf() {\n A=2\n}\npython a.py $A", "$A"),
        ("A=1\ntrue && A=2\npython a.py $A", "$A"),
        ("A=1\nif [ x = x ] && [ $HOST = y ]; then A=2; fi\npython a.py $A", "$A"),
        ("A=1\nif [ x != x ]; then A=2; elif [ -z '' ]; then A=3; fi\npython a.py $A", "3"),
        ("A=$(date)\npython a.py $A", "$A"),
        ("A=1 B=2 python a.py ${B:-3}", "3"),
    ],
)
def test_a_variable_is_plain_where_the_script_alone_decides_it(text: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(text + "\n")
    assert read_script(file).words[-1] == value


def test_an_assignment_keeps_the_words_of_a_variable_together(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('A="--lr 1"\nA="${A}"\nB=$A\nA="$A --bf16"\npython train.py $A $B\n')
    assert read_script(tmp_path / "run.sh").words[2:] == ["--lr", "1", "--bf16", "--lr", "1"]


def test_a_sourced_file_sources_its_neighbour_and_files_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "run.sh").write_text("DIR=$(pwd)\nsource models/moe.sh\npython train.py ${COMMON} ${MODEL} ${LAST}\n")
    (tmp_path / "models/moe.sh").write_text(
        'source $(dirname "${BASH_SOURCE[0]}")/common.sh\nMODEL="--num-experts 8"\nsource ${DIR}/last.sh\n'
    )
    (tmp_path / "models/common.sh").write_text('COMMON="--bf16"\n')
    (tmp_path / "last.sh").write_text("LAST=--swiglu\n")
    assert read_script(tmp_path / "run.sh").words[2:] == ["--bf16", "--num-experts", "8", "--swiglu"]


def test_a_file_that_sources_another_of_its_own_name_does_not_run_twice(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "run.sh").write_text("source models/common.sh\nsource run.sh\npython train.py ${COMMON} ${ALL}\n")
    (tmp_path / "models/common.sh").write_text('source ${ROOT}/common.sh\nCOMMON="--bf16"\n')
    assert read_script(tmp_path / "run.sh").words[2:] == ["--bf16", "${ALL}"]
    (tmp_path / "common.sh").write_text('ALL="--swiglu"\n')
    assert read_script(tmp_path / "run.sh").words[2:] == ["--bf16", "--swiglu"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr 1 --lr 2", 2.0),
        ("--lr=3", 3.0),
        ("--lr -4", -4.0),
        ("torchrun --nproc_per_node 8 train.py --wd 1", 5.0),
        ("--lr", 5.0),
    ],
)
def test_flags_are_read_as_argparse_reads_them(words: str, expected: float) -> None:
    assert Arguments(Flags(words.split()), {"lr": 5.0}, None).lr == expected


def test_underscores_and_negations_name_the_same_flag() -> None:
    flags = Flags(["--use_tis", "--rl-partial-rollouts", "--no-rl-partial-rollouts", "--no-x", "--x"])
    assert "use-tis" in flags and "rl-partial-rollouts" not in flags and "x" in flags


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
