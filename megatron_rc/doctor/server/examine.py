"""The registry of all checks of an SGLang server, in the order in which they are shown."""

from collections.abc import Sequence
from pathlib import Path

from megatron_rc.doctor.registry import Finding, Registry
from megatron_rc.doctor.server.answers import ANSWERS
from megatron_rc.doctor.server.facts import Facts, read_trainer
from megatron_rc.doctor.server.floor import Floors
from megatron_rc.doctor.server.model import MODEL, usual_k3
from megatron_rc.doctor.server.probe import read_servers
from megatron_rc.doctor.server.probes import PROBES, examine_probes
from megatron_rc.doctor.server.sampling import SAMPLING
from megatron_rc.doctor.server.serving import SERVING
from megatron_rc.doctor.server.syncs import examine_syncs
from megatron_rc.doctor.server.trainer_scores import TrainerModel

SGLANG: Registry[Facts] = Registry("SGLang server", SERVING, MODEL, SAMPLING, ANSWERS)


def examine_servers(
    urls: Sequence[str] | None,
    config: Path | None,
    hf_path: str | None,
    timeout: float,
    assignments: Sequence[str] = (),
    *,
    probe: bool = False,
    syncs: int = 0,
    floors: Floors | None = None,
) -> dict[str, list[Finding]]:
    """Findings about each server, by subject.

    Args:
        urls: servers and routers; None: those of ``config``.
        config, hf_path, assignments: see ``read_trainer``.
        timeout: seconds to wait for one answer.
        syncs: updates with the trainer's weights after the probes, which must not change anything; 0: none.
        floors: keeps the noise floor of each server that is probed.
        probe: also sample from every server, and score the tokens again by its prefill and by the trainer.

    Raises ValueError where no server is named, or a server or the trainer's side cannot be read.
    """
    trainer = read_trainer(config, hf_path, assignments)
    urls = urls or (trainer.job.rollout.sglang.urls if trainer.job else ())
    if not urls:
        raise ValueError("give the servers to look at with --sglang URL, or a job's YAML with --config")
    if syncs and not probe:
        raise ValueError("--syncs is a part of --probe: give both")
    model_path = hf_path or (trainer.job.model.hf_path if trainer.job else None)
    if probe and model_path is None:
        raise ValueError(
            "--probe needs the trainer's checkpoint: give it with --hf-path DIR, or a job's YAML that names it"
        )
    servers = read_servers(urls, timeout)
    dtype = trainer.job.train.dtype if trainer.job else "fp32"
    model = TrainerModel(model_path, dtype) if probe and model_path is not None else None
    temperature = trainer.job.rollout.temperature if trainer.job else 1.0
    found = {}
    for served in servers:
        findings = SGLANG.run(Facts(served, trainer))
        if model is not None:
            checks = PROBES if floors is None else floors.checks(served)
            usual = usual_k3(Facts(served, trainer))
            findings += examine_probes(served, model.rescore, model.vocab_size, temperature, timeout, checks, usual)
            if syncs:
                findings += examine_syncs(served, trainer, model, syncs, timeout, usual)
        found[f"{SGLANG.subject} {served.url}"] = findings
    return found
