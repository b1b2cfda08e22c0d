"""What doctor reads in flags and launch scripts: plain variables are followed, what a branch decides stays open."""

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
