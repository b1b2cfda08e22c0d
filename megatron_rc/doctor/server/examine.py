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
    """Findings of every server, under its name.

    Args:
        urls: servers and routers; None: those of ``config``.
        config: YAML of the job.
        hf_path: directory of the trained model, instead of the YAML's.
        timeout: seconds to wait for one answer.
        assignments: key=value changes of the YAML.

    Raises:
        ValueError: no server is named, or one of these cannot be read.
    """
    trainer = read_trainer(config, hf_path, assignments)
    chosen = urls or (trainer.job.rollout.sglang.urls if trainer.job else ())
    if not chosen:
        raise ValueError("give the servers to look at with --sglang URL, or a job's YAML with --config")
    return {f"{SGLANG.subject} {s.url}": SGLANG.run(Facts(s, trainer)) for s in read_servers(chosen, timeout)}
