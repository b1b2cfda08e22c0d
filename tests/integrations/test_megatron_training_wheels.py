"""megatron.training as the wheels of megatron-core ship it: its signatures, and `pretrain` itself, patched, on CPU.

The wheels are of Python 3.12 and up, so no environment of 3.11 has them installed. They are unpacked from the folder
that MEGATRON_CORE_WHEELS names, .venv/megatron-training by default.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_wheels import WHEELS, printed_by, unpacked_wheels

from megatron_rc.integrations import megatron_training
from megatron_rc.source import definition, parameters_of

FLAGS = shlex.split(
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --min-lr 0 --lr-decay-style constant "
    "--tokenizer-type NullTokenizer --vocab-size 63 --transformer-impl local --distributed-backend gloo "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --use-cpu-initialization --no-rope-fusion "
    "--position-embedding-type rope --attention-softmax-in-fp32 --no-check-for-nan-in-loss-and-grad "
    "--dataloader-type external --log-interval 1 --eval-iters 0 --eval-interval 1000 --exit-interval 4"
)


@pytest.fixture(scope="module")
def unpacked() -> Iterator[dict[str, Path]]:
    """Version -> folder that goes onto sys.path."""
    with unpacked_wheels() as folders:
        yield folders


@pytest.mark.host("megatron-training", proof="own code", feature="symbols where they are expected")
def test_the_wheels_have_the_signatures_of_the_table(unpacked: dict[str, Path]) -> None:
    for version, folder in unpacked.items():
        host = megatron_training.host(version)
        assert version.rpartition(".")[0] in host.versions
        for symbol in host.symbols:
            node = definition(folder / f"{symbol.module.replace('.', '/')}.py", symbol.name)
            assert node is not None and parameters_of(node) == symbol.parameters, (version, symbol.name)


def pretrain(folder: Path, settings: dict[str, object] | None, *flags: str) -> str:
    """What tests/support/pretrain_job.py prints on the megatron-core of a folder."""
    return printed_by("pretrain_job.py", folder, json.dumps(settings), *FLAGS, *flags)


def logged(printed: str, name: str) -> list[float]:
    return [float(found) for found in re.findall(rf"iteration +\d+/.*\| {re.escape(name)}: ([-+.\dE]+) \|", printed)]


SETTINGS = {"correction": "token-tis", "lr": 1e-3, "decay_period": 2}


def test_pretrain_of_the_newest_wheel_logs_the_correction_and_decays(unpacked: dict[str, Path]) -> None:
    printed = pretrain(list(unpacked.values())[-1], SETTINGS)
    assert logged(printed, "learning rate") == [1e-3, 5e-4, 5e-4, 2.5e-4]
    k3 = logged(printed, "rc/k3")
    assert len(k3) == 4 and all(0.02 < value < 0.1 for value in k3)  # the sampler's log-probs are off by N(0, 0.3^2)
    assert len(logged(printed, "rc/response_length")) == 4
    assert max(logged(printed, "rc/truncated_token")) > 0


@pytest.mark.full
@pytest.mark.parametrize("version", WHEELS or ["none"])
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_restart_goes_on_with_the_decay(unpacked: dict[str, Path], version: str, form: str, tmp_path: Path) -> None:
    whole = pretrain(unpacked[version], SETTINGS)
    save = ("--save", str(tmp_path), "--save-interval", "1", "--exit-interval", "1")
    first = pretrain(unpacked[version], SETTINGS, "--ckpt-format", form, *save)
    rest = pretrain(unpacked[version], SETTINGS, "--ckpt-format", form, "--load", str(tmp_path))
    assert logged(first + rest, "learning rate") == logged(whole, "learning rate") == [1e-3, 5e-4, 5e-4, 2.5e-4]
    alone = pretrain(unpacked[version], None)
    assert logged(alone, "learning rate") == [1e-3] * 4 and "rc/k3" not in alone
