"""Real process groups: NCCL on GPUs, gloo on a CPU; a group of this process alone, and one of two processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import checkout
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from checking import head
from checking.row_problem import Answer, Problem, report, solve, truth
from checking.rows import problem
from checking.setting import Check, Comparison, Setting, generator, poisoned
from checking.toy import toy_blocks
from megatron_rc.collectives import all_gather_into, reduce_scatter_into
from megatron_rc.fused import rows as fused_rows
from megatron_rc.logprobs import gather_statistics
from megatron_rc.reference.rows import Rows

RANKS = 2
_PATIENCE = 120.0
"""Seconds for two processes to start, to meet, and to compile what they call."""
_WAYS = tuple(itertools.product(head.FORMS, (False, True)))
"""Forms of the head, without and with sequence parallelism."""


def checks(setting: Setting) -> Iterator[Check]:
    yield Check("groups", "one rank: log-probs as without a group", _alone)
    yield Check("groups", "one rank: statistics that are gathered over it and merged", _gathered)
    for form, sequence_parallel in _WAYS:
        yield Check("groups", f"one rank: {_named(form, sequence_parallel)}", partial(_head, form, sequence_parallel))
    yield Check("groups", "two ranks: log-probs and both forms of the head", _two_ranks)


def _named(form: str, sequence_parallel: bool) -> str:
    return f"{form}{', sequence-parallel' if sequence_parallel else ''}"


@contextmanager
def _one_rank(setting: Setting) -> Iterator[dist.ProcessGroup]:
    """The group of this process alone."""
    dist.init_process_group(_backend(setting), store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _backend(setting: Setting) -> str:
    return "nccl" if setting.cuda else "gloo"


def _rows_of_logits(setting: Setting) -> Problem:
    given = problem(setting, torch.bfloat16, *setting.size((300, 9500), (6, 40)), "groups")
    given.options |= {
        "mask": torch.arange(len(given.targets), device=setting.device) % 5 != 2,
        "temperature": 0.5 + torch.rand(len(given.targets), device=setting.device, generator=generator(setting, "t")),
    }
    return given


def _alone(setting: Setting, comparison: Comparison) -> None:
    given = _rows_of_logits(setting)
    with _one_rank(setting) as group, poisoned():
        ours = solve(replace(given, options=given.options | {"tp_group": group}), "triton")
    expected = solve(given, "triton")
    for name in Answer._fields:
        comparison.equal(name, getattr(ours, name), getattr(expected, name))


def _gathered(setting: Setting, comparison: Comparison) -> None:
    """The way of several ranks, which a group of one does not take by itself."""
    given = _rows_of_logits(setting)
    rows = Rows(
        given.targets, given.options["temperature"], given.options["mask"], None, None, 0, given.logits.shape[1]
    )
    gradient = torch.empty_like(given.logits)
    with _one_rank(setting) as group, poisoned():
        statistics = fused_rows.shard_statistics(given.logits, rows, with_entropy=True)
        merged = fused_rows.merge_shards(gather_statistics(statistics, group), rows, with_entropy=True)
        fused_rows.write_gradient(gradient, given.logits, rows, merged, given.up, given.up_entropy)
        for collective in (all_gather_into, reduce_scatter_into):
            found = torch.empty_like(given.logits)
            collective(found, given.logits, group)
            comparison.equal(collective.__name__, found, given.logits)
    assert merged.entropy is not None
    ours = Answer(merged.logprobs, merged.entropy, gradient)
    report(setting, comparison, given, ours, solve(given, "torch"), truth(given))


def _head(form: str, sequence_parallel: bool, setting: Setting, comparison: Comparison) -> None:
    given = head.head_of(setting, torch.bfloat16, "groups")
    with _one_rank(setting) as group:
        given.of_head |= {"tp_group": group, "sequence_parallel": sequence_parallel}
        head.compare(setting, comparison, given, form)


def _two_ranks(setting: Setting, comparison: Comparison) -> None:
    if not setting.interpreted:
        setting.need_devices(RANKS)
    answers = _answers_of_ranks(setting)
    given = _rows_of_logits(setting)
    ranks = [Answer(*own["log-probs"]) for own in answers]
    for name in ("logprobs", "entropy"):
        comparison.equal(f"{name} of both ranks", *(getattr(own, name) for own in ranks))
    ours = ranks[0]._replace(gradient=torch.cat([own.gradient for own in ranks], 1))
    report(setting, comparison, given, ours, solve(given, "torch"), truth(given))
    for form, sequence_parallel in _WAYS:
        shards = [head.Answer(*own[_named(form, sequence_parallel)]) for own in answers]
        for name in ("loss", "logprobs", "entropy"):
            comparison.equal(f"{form}: {name} of both ranks", *(getattr(own, name) for own in shards))
        by_hidden = [own.by_hidden for own in shards]
        if not sequence_parallel:
            comparison.equal(f"{form}: by_hidden of both ranks", *by_hidden)
        whole = shards[0]._replace(
            by_hidden=torch.cat(by_hidden) if sequence_parallel else by_hidden[0],
            by_weight=torch.cat([own.by_weight for own in shards]),
        )
        head.judge(setting, comparison, head.head_of(setting, torch.bfloat16, "groups"), whole)


def _answers_of_ranks(setting: Setting) -> list[dict[str, tuple[Any, ...]]]:
    """What each of the processes answers."""
    with TemporaryDirectory() as folder:
        processes = mp.start_processes(_rank, (folder, setting), nprocs=RANKS, join=False, start_method="spawn")
        end = time.monotonic() + _PATIENCE
        while not processes.join(timeout=1):
            if time.monotonic() > end:
                for process in processes.processes:
                    process.kill()
                raise TimeoutError(f"two ranks have not answered within {_PATIENCE:g} s")
        return [torch.load(Path(folder, str(rank)), map_location=setting.device) for rank in range(RANKS)]


def _rank(rank: int, folder: str, setting: Setting) -> None:
    """The answers of one rank, whose shard is not as wide as the other one's."""
    torch.set_num_threads(1)
    if setting.cuda:
        torch.cuda.set_device(rank)
        setting = setting.on(torch.device("cuda", rank))
    meeting = f"file://{folder}/meeting"
    patience = timedelta(seconds=_PATIENCE)
    dist.init_process_group(_backend(setting), init_method=meeting, rank=rank, world_size=RANKS, timeout=patience)
    group = dist.group.WORLD
    given = _rows_of_logits(setting)
    given.logits = given.logits[:, _shard(rank, given.logits.shape[1])]
    given.options["tp_group"] = group
    with toy_blocks() if setting.small else nullcontext(), checkout.faster_interpreter(), poisoned():
        answers: dict[str, tuple[Any, ...]] = {"log-probs": tuple(solve(given, "triton"))}
        for form, sequence_parallel in _WAYS:
            case = head.head_of(setting, torch.bfloat16, "groups")
            case.of_head |= {"tp_group": group, "sequence_parallel": sequence_parallel}
            hidden = case.hidden.chunk(RANKS)[rank] if sequence_parallel else case.hidden
            weight = case.weight[_shard(rank, len(case.weight))]
            answers[_named(form, sequence_parallel)] = tuple(head.by_head(case, form, hidden, weight))
    torch.save(answers, Path(folder, str(rank)))
    dist.destroy_process_group()


def _shard(rank: int, width: int) -> slice:
    cut = 2 * width // 5
    return slice(cut) if rank == 0 else slice(cut, width)
