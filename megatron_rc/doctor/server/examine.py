"""The registry of all checks of an SGLang server, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rc.doctor.registry import Finding, Registry
from megatron_rc.doctor.server.answers import ANSWERS
from megatron_rc.doctor.server.facts import Facts, read_trainer
from megatron_rc.doctor.server.model import MODEL
from megatron_rc.doctor.server.probe import read_servers
from megatron_rc.doctor.server.sampling import SAMPLING
from megatron_rc.doctor.server.serving import SERVING

SGLANG: Registry[Facts] = Registry("SGLang server", SERVING, MODEL, SAMPLING, ANSWERS)


def examine_servers(
    urls: Sequence[str] | None,
    config: Path | None,
    hf_path: str | None,
    timeout: float,
    assignments: Sequence[str] = (),
) -> dict[str, list[Finding]]:
    """Findings about each server, by subject.

    Args:
        urls: servers and routers; None: those of ``config``.
        config, hf_path, assignments: see ``read_trainer``.
        timeout: seconds to wait for one answer.

    Raises:
        ValueError: no server is named, or a server or the trainer's side cannot be read.
    """
    trainer = read_trainer(config, hf_path, assignments)
    urls = urls or (trainer.job.rollout.sglang.urls if trainer.job else ())
    if not urls:
        raise ValueError("give the servers to look at with --sglang URL, or a job's YAML with --config")
    return {f"{SGLANG.subject} {s.url}": SGLANG.run(Facts(s, trainer)) for s in read_servers(urls, timeout)}
