"""What ranks of the patched megatron-lm do in the tests: log-probs over tensor-parallel ranks, a training step."""

import logging
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hosts.megatron_lm import sources
from megatron.core import num_microbatches_calculator, parallel_state
from torch import Tensor

from megatron_rc import RolloutCorrection, patch
from megatron_rc.integrations import hosts, patching
from megatron_rc.integrations.megatron_lm import HOST
from megatron_rc.integrations.run_script import PatchSettings
from megatron_rc.training import emulation

VOCABULARY, WIDTH = 11, 12


class Model(torch.nn.Module):
    """A bigram model; the logits of a rank are its share of the vocabulary, which `gathers` counts the gathers of."""

    def __init__(self, group: Any = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=draw).to(dtype))
        self.dtype, self.config, self.gathers = dtype, SimpleNamespace(flash_decode=False), 0
        self.pg_collection = SimpleNamespace(tp=group, pp=None, cp=None)

    def forward(self, tokens: Tensor, position_ids: Any, mask: Any, **options: Any) -> Tensor:
        logits, group = self.table[tokens], self.pg_collection.tp
        if group is None or options["runtime_gather_output"]:
            self.gathers += group is not None
            return logits
        return torch.tensor_split(logits, group.size(), dim=-1)[group.rank()]


@dataclass
class Rollout:
    """TokenRollout, as far as it is read."""

    trajectory: list[list[int]]
    generation_mask: list[list[bool]] | None
    logprobs: list[list[float]] | None
    reward: float


def rollouts() -> list[list[Rollout]]:
    """Four rollouts of 3 to 8 tokens; the last log-prob of the second is missing."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for prompt, answer in ((1, 2), (2, 5), (1, 7), (3, 3)):
        tokens = torch.randint(0, VOCABULARY, (prompt + answer,), generator=draw).tolist()
        sampled = (torch.randn(answer, generator=draw) * 0.5 - 2.4).tolist()[: answer - (answer == 5)]
        advantage = float(torch.randn((), generator=draw))
        made.append(Rollout([tokens], [[False] * prompt + [True] * answer], [sampled], advantage))
    return [made[:2], made[2:]]


@dataclass
class Cut:
    """How the four rollouts are cut: rows of a micro-batch, or the bins of each data-parallel rank."""

    rows: int = 1
    bins: list[list[list[int]]] | None = None


def enter(world: int) -> None:
    emulation.emulate_cuda_on_cpu()
    hosts.HOSTS["megatron-lm"] = replace(HOST, read_version=lambda: "0.20.0")
    parallel_state.initialize_model_parallel()
    num_microbatches_calculator.init_num_microbatches_calculator(dist.get_rank(), None, world, 1, world)


def step(host: SimpleNamespace, cut: Cut, settings: PatchSettings) -> dict[str, Any]:
    """One rollout batch and one training step over all of it on every data-parallel rank: gradient and log."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, everything = Model(), rollouts()
    mine = everything[rank : rank + 1] if world == 2 else everything
    bins = cut.bins[rank] if cut.bins else None
    with patch("megatron-lm", correction=settings.correction, lr_rule=settings.lr_rule):
        tokenizer = Namespace(seq_length=WIDTH, rows=cut.rows, bins=bins)
        prepare = host.rl_utils.prepare_data_for_update
        iterator, _, _ = prepare([model], None, mine, tokenizer, bins is not None, True, {})
        count = len(bins) if bins else sum(map(len, mine)) // cut.rows
        num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR.num_micro_batches = count
        logs = host.training.train_step(host.train_rl.forward_step, iterator, model, None, None, count, None)
    dist.all_reduce(model.table.grad)
    pairs = {name: sum(log[name] for log in logs) for name in logs[0]}
    for pair in pairs.values():
        dist.all_reduce(pair)
    log = {name: float(pair[0] / pair[1]) for name, pair in pairs.items()}
    return {"gradient": model.table.grad / world, "log": log}


def weights_by_epoch(
    rank: int, cuts: list[Cut], correction: RolloutCorrection, segments: list[list[list[tuple[int, int]]]]
) -> list[dict[str, Any]]:
    """The weights that the loss gets under every cut, sequence by sequence, the metrics of the batch, and warnings."""
    enter(1)
    found: list[dict[str, Any]] = []
    warnings: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = warnings.append  # type: ignore[method-assign]
    logging.getLogger("megatron_rc.integrations").addHandler(handler)
    with sources.imported(sources.STUB) as host, patch("megatron-lm", correction=correction):
        for cut in cuts:
            tokenizer = Namespace(seq_length=WIDTH, rows=cut.rows, bins=cut.bins and cut.bins[0])
            prepare = host.rl_utils.prepare_data_for_update
            iterator, _, _ = prepare([Model()], None, rollouts(), tokenizer, cut.bins is not None, True, segments)
            if cut.bins is None:
                weights = torch.cat([next(iterator)[-1] for _ in range(4 // cut.rows)])
            else:
                packing = host.rl_utils.get_rl_runtime_state().packing_context
                weights, info = torch.zeros(4, WIDTH - 1), packing.packing_info
                for row, members in enumerate(info.bin_seq_indices):
                    for start, number in zip(info.seq_starts[row], members, strict=False):
                        last = info.seq_lengths[number] - 1
                        weights[number, :last] = packing.packed_inference_logprobs[row, start : start + last]
            log = dict(patching.INSTALLED["megatron-lm"].session.rollout_log)
            found.append({"weights": weights, "log": log, "warnings": [each.getMessage() for each in warnings]})
    return found


def logprobs(folder: Path, temperature: float) -> dict[str, SimpleNamespace]:
    """Log-probs of the host's own function ("host") and ours ("patched"), the model's gradient, gathers they took."""
    tokens = torch.randint(0, VOCABULARY, (3, WIDTH), generator=torch.Generator().manual_seed(7))
    upstream = torch.randn(3, WIDTH - 1, generator=torch.Generator().manual_seed(8))
    found = {}
    with sources.imported(folder) as host:
        from megatron.training.global_vars import args

        args.rl_default_temperature, args.bf16, args.fp16 = temperature, False, False
        for name in ("host", "patched"):
            model = Model(dist.group.WORLD)
            with patch("megatron-lm", correction=RolloutCorrection()) if name == "patched" else nullcontext():
                values = host.rl_utils.get_logprobs(model, tokens, tokens)
            values.backward(upstream)
            if name == "patched":
                dist.all_reduce(model.table.grad)
            gradient, gathers = model.table.grad, model.gathers
            found[name] = SimpleNamespace(logprobs=values.detach(), gradient=gradient, gathers=gathers)
    return found


def run(
    rank: int, cuts: list[Cut], settings: PatchSettings, folders: list[Path], temperatures: list[float]
) -> dict[str, Any]:
    """Everything that this number of ranks is asked for."""
    enter(dist.get_world_size())
    with sources.imported(sources.STUB) as host:
        steps = [step(host, cut, settings) for cut in cuts]
    return {"steps": steps, "logprobs": {t: [logprobs(folder, t) for folder in folders] for t in temperatures}}
