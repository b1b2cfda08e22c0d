"""Losses and gradients of the cases on real ranks: ours, and those of the host's own source where it is at hand.

``SLIME_DIR=<source tree> python tests/support/hosts/slime/runs.py`` writes golden.json: what slime itself returns on
one rank.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))

from hosts.slime import sources
from hosts.slime.cases import CASES, KNOWN, LOG, Case, batch_of, hosts_own, ours, whole
from hosts.slime.host import VOCAB, given_to_tis, hooks, naming, positions

from megatron_rc.integrations import first_batch
from megatron_rc.integrations.slime.signals import LENGTHS

GOLDEN = Path(__file__).parent / "golden.json"
PADDED = 13
LAYOUTS = {"tp2": {"tensor_model_parallel_size": 2}, "cp2": {"context_parallel_size": 2}, "dp2": {}}


def differentiated(function: Any, args: Namespace, batch: dict[str, Any], reduce: Any, shard: slice) -> dict[str, Any]:
    """What a loss function of the host's signature returns, with the gradient of this rank's logits."""
    logits = batch["logits"][..., shard].clone().requires_grad_()
    loss, log = function(args, {k: v for k, v in batch.items() if k != "logits"}, logits, reduce)
    (gradient,) = torch.autograd.grad(loss, logits)
    return {"loss": loss.item(), "gradient": gradient, "log": {k: float(v) for k, v in log.items() if k in LOG + KNOWN}}


def golden() -> dict[str, dict[str, Any]]:
    """case -> what slime returned on one rank, with the gradient of the logits."""
    found = json.loads(GOLDEN.read_text())
    return {name: {**run, "gradient": torch.tensor(run["gradient"])} for name, run in found.items()}


def work(rank: int) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(host or "ours", layout, case) -> result, on every rank of a world of two."""
    real = {host: sources.modules(host) for host in sources.VARIABLES if sources.folder(host)}
    results = {}
    for layout, sizes in LAYOUTS.items():
        parallel_state.initialize_model_parallel(**sizes)
        for module in real.values():
            module.set_up()
        cp, tp = sizes.get("context_parallel_size", 1), sizes.get("tensor_model_parallel_size", 1)
        cp_rank, width = rank % cp, VOCAB // tp
        shard = slice(width * (rank % tp), width * (rank % tp + 1))
        for name, case in CASES.items():
            for padded in (None, PADDED):
                label = layout + (" padded" if padded else "")
                batch = batch_of(case, cp_rank, cp, padded)
                changes = {"context_parallel_size": cp, "qkv_format": "bshd" if padded else "thd"}
                per_token = "calculate_per_token_loss" in case.both
                reduce = whole().sum_of_sample_mean(cp_rank, cp, per_token=per_token, padded=padded)
                results["ours", label, name] = differentiated(hooks.loss, ours(case, **changes), batch, reduce, shard)
                for host, module in real.items():
                    if host == "miles" or not padded:
                        args = hosts_own(case, host, **changes)
                        reduce = module.reducer(batch, args)
                        results[host, label, name] = differentiated(module.policy_loss, args, batch, reduce, shard)
                        # it raises where the host's own loss is another one
                        first_batch.COMPARED.clear()
                        sys.modules[started := f"{host}.backends.megatron_utils.initialize"] = ModuleType(host)
                        differentiated(hooks.loss, ours(case, **changes), batch, reduce, shard)
                        del sys.modules[started]
                        assert bool(first_batch.COMPARED) == (case.correction != {"old": "current"})
        results["hooks", layout, ""] = {**_units(cp_rank, cp), **_whole_rollouts(rank, layout, cp_rank, cp)}
        of_padded = results["hooks", f"{layout} padded", ""] = _units(cp_rank, cp, PADDED)
        of_padded["length"] = _length_of_micro_batches(rank, layout)
        parallel_state.destroy_model_parallel()
    return results


UNITS = {
    "sequence": {"preset": "seq-tis", "reject": [{"statistic": "ratio", "level": "sequence", "upper": 2.5}]},
    "turn": {"weight": {"level": "segment", "mode": "clip", "lower": 0.8, "upper": 1.2}},
}
"""Corrections whose units context parallelism cuts."""
BATCH_MEAN = {"preset": "token-tis", "normalize": "batch"}


def _units(cp_rank: int, cp_size: int, padded: int | None = None) -> dict[str, Any]:
    """The weights that tis gives to sequences and turns, in the layout of slime, or padded in that of miles."""
    found: dict[str, Any] = {}
    for name, correction in UNITS.items():
        batch = batch_of(Case(), cp_rank, cp_size, padded)
        losses = torch.ones(sum(map(len, batch["log_probs"])))
        args = ours(Case(correction), use_tis=True, qkv_format="bshd" if padded else "thd")
        more = {"max_seq_lens": batch["max_seq_lens"], "parallel_state": object()} if padded else {}
        found[name], _, _ = hooks.tis(args, pg_loss=losses, **given_to_tis(batch), **more)
    return found


def _length_of_micro_batches(rank: int, layout: str) -> Any:
    """What the rule of the learning rate reads on miles, whose hooks see micro-batches alone."""
    if layout == "dp2":
        LENGTHS.take(0, torch.device("cpu"))
        LENGTHS.record([10, 20] if rank == 0 else [60])
    return LENGTHS.take(0, torch.device("cpu"))


def _whole_rollouts(rank: int, layout: str, cp_rank: int, cp_size: int) -> dict[str, Any]:
    """rollout_data on this rank's half of the samples under dp2; a mean length."""
    found: dict[str, Any] = {}
    half = slice(2 * rank, 2 * rank + 2) if layout == "dp2" else slice(None)
    data = {key: value[half] for key, value in batch_of(Case(), cp_rank, cp_size).items() if isinstance(value, list)}
    hooks.rollout_data(ours(Case(BATCH_MEAN), **naming("rollout_data")), 7, data)
    found["advantages"] = torch.cat(data["advantages"])
    found["metrics"] = {key: value.item() for key, value in data.items() if key.startswith("rc/")}
    if layout == "dp2":
        LENGTHS.record_rollout(8, *(([10, 20], [0, 1]) if rank == 0 else ([60], [1])))
    found["length"] = LENGTHS.take(8 if layout == "dp2" else 7, torch.device("cpu"))
    return found


def whole_gradient(layout: str, case: Case, ranks: list[Tensor]) -> Tensor:
    """[1, T, VOCAB] of the batch on one rank, from the gradients of its shards or slices."""
    if layout.startswith("tp2"):
        return torch.cat(ranks, dim=-1)
    if layout.startswith("dp2"):
        return ranks[0]
    padded = PADDED if layout.endswith("padded") else None
    totals = whole().totals
    samples = [torch.zeros(2 * (padded or total) + 4, VOCAB) for total in totals]
    for rank, gradient in enumerate(ranks):
        rows = gradient.reshape(-1, VOCAB)
        for sample, total in zip(samples, totals, strict=True):
            where = torch.tensor(positions(padded or total, rank, 2))
            sample[where], rows = rows[: len(where)], rows[len(where) :]
    samples = [sample[: padded or total] for sample, total in zip(samples, totals, strict=True)]
    return torch.stack(samples) if padded else torch.cat([*samples, torch.zeros(3, VOCAB)])[None]


def _record() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    host = sources.modules("slime")
    found = {}
    for name, case in CASES.items():
        args, batch = hosts_own(case, "slime"), batch_of(case)
        run = differentiated(host.policy_loss, args, batch, host.reducer(batch, args), slice(None))
        found[name] = {**run, "gradient": [[[round(x, 9) for x in row] for row in g] for g in run["gradient"].tolist()]}
    GOLDEN.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    _record()
