"""From settings to a running job: its task, its engine, and the objects of the training loop.

Functions import what they build, because torch, transformers and megatron-core take seconds to import, may be missing
where only the command line is used, and print warnings that must be silenced first. megatron-core must also be
imported after the emulation of CUDA is on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rc import versions

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rc.engine import RolloutEngine
    from megatron_rc.settings.job import JobSettings
    from megatron_rc.tasks import Task
    from megatron_rc.training.groups import Groups
    from megatron_rc.training.loop import Job
    from megatron_rc.training.policy import Policy
    from megatron_rc.training.probe import Probe


def quiet_imports() -> None:
    """Silence megatron-core's import-time warnings about missing libraries."""
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron|torch\.distributed")


def train(settings: JobSettings, *, fresh: bool, dump: bool) -> None:
    """Build everything and run the job on this process."""
    with opened(settings, fresh=fresh, dump=dump) as job:
        if job:
            job.run()


@contextmanager
def opened(settings: JobSettings, *, fresh: bool, dump: bool) -> Iterator[Job | None]:
    """Open everything that the job needs on this process; it is closed at the end of the block.

    Yields None where nothing is left to do.
    """
    versions.check_core(versions.megatron_core_version())
    quiet_imports()
    from megatron_rc.backend import set_debug_checks
    from megatron_rc.training import emulation

    set_debug_checks(settings.train.debug_checks)
    emulation.emulate_cuda_on_cpu()
    from megatron_rc.jobs.folder import Start, begin, worked_in
    from megatron_rc.models.config import hf_config_dict
    from megatron_rc.report import sinks
    from megatron_rc.rollout.perturb import perturbed
    from megatron_rc.rollout.stale import StaleEngine
    from megatron_rc.settings import combinations
    from megatron_rc.training import groups as parallel
    from megatron_rc.training.loop import Job
    from megatron_rc.training.observers import Observers
    from megatron_rc.training.policy import Policy

    task, rollout = _task(settings, hf_config_dict(settings.model)), settings.rollout
    with parallel.initialized(settings.parallel, settings.train.seed) as groups, ExitStack() as leaving:
        combinations.check(settings, every_step=dump, ranks=groups.data_size)
        groups.gather(lambda: sinks.requested(vars(settings.log)) if groups.is_writer else {})

        def first() -> Start:
            leaving.enter_context(worked_in(Path(settings.output)))
            return begin(settings, fresh=fresh)

        start = groups.gather(lambda: first() if groups.is_writer else Start())[0]
        if start.finished:
            yield None
            return
        policy = leaving.enter_context(closing(Policy(settings.model, settings.parallel, settings.train, groups)))
        probe = _probe(settings, policy)

        def export(version: int) -> Iterable[tuple[str, Tensor]]:
            if probe:
                probe.refresh()
            seed = settings.train.seed if rollout.amplify_seed is None else rollout.amplify_seed
            noise = f"seed {seed}" if rollout.amplify_fixed else version
            return perturbed(policy.export(), quantize=rollout.quantize, amplify=rollout.amplify, noise=noise)

        engine = leaving.enter_context(closing(_engine(settings, policy, groups, probe)))

        def serve_trained(version: int) -> None:
            serve = engine.serve_now if isinstance(engine, StaleEngine) else engine.update_weights
            serve(policy.export(), version)

        observers = leaving.enter_context(Observers(settings, writer=groups.is_writer, dumps=dump))
        job = Job(settings, groups, policy, engine, task, observers, start=start.goes_on_from, export=export)
        if settings.train.eval_weights == "trained":
            job.serve_trained = serve_trained
        yield job


def _task(settings: JobSettings, hf_config: dict[str, Any]) -> Task:
    from megatron_rc.models.layout import check_context
    from megatron_rc.tasks.registry import build_task

    kind, options = settings.task.kind, settings.task.options
    task = build_task(kind, options, seed=settings.train.seed, tokenizer=settings.model.hf_path)
    if task.vocab_size > hf_config["vocab_size"]:
        ids, model, path = task.vocab_size, hf_config["vocab_size"], settings.model.hf_path
        remedy = f"take the tokenizer of {path}" if path else f"set model.config.vocab_size={ids}"
        raise ValueError(f"the tokenizer of task {kind!r} has {ids} ids, the model's vocab_size is {model}: {remedy}")
    check_context(hf_config, prompt=task.longest_prompt, max_new_tokens=settings.rollout.max_new_tokens)
    return task


def _engine(settings: JobSettings, policy: Policy, groups: Groups, probe: Probe | None) -> RolloutEngine:
    from megatron_rc.rollout.opening import Opening, open_engine

    opening = Opening(
        settings=settings.rollout,
        hf_config=policy.hf_config,
        device=policy.device,
        output=Path(settings.output),
        rank=groups.rank,
        writer=groups.is_writer,
        returns_routes=settings.moe.wants_routes,
        in_background=settings.train.asynchronous > 0,
        agree=groups.raise_everywhere,
        probe=probe.logprobs if probe else None,
    )
    return open_engine(opening, groups.together)


def _probe(settings: JobSettings, policy: Policy) -> Probe | None:
    """Probe that checks the servers' weights; None if a perturbation changes them on purpose."""
    rollout = settings.rollout
    if not rollout.kind.has_servers or rollout.quantize != "none" or rollout.amplify or rollout.lag:
        return None
    from megatron_rc.rollout.sglang.control import probe_prompt
    from megatron_rc.training.probe import Probe

    return Probe(policy, probe_prompt(policy.hf_config["vocab_size"], policy.hf_config["max_position_embeddings"]))
