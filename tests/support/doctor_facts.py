"""Facts of two servers as real ones told them, and trainers that suit them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rc import schema
from megatron_rc.doctor.server.facts import Facts, ProbeAnswer, ServerFacts, TrainerFacts
from megatron_rc.settings import JobSettings

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/sglang_facts.json").read_text())


def server(kind: str) -> ServerFacts:
    """A recorded server: good_moe has every flag a job needs; bad_dense was started with many that harm it."""
    fields = copy.deepcopy(RECORDED[kind])
    probes = {name: ProbeAnswer(**probe) for name, probe in fields.pop("probes").items()}
    return ServerFacts(**fields, probes=probes)


def trainer(config: Mapping[str, Any], rollout: Mapping[str, Any] | None = None, **other: Any) -> TrainerFacts:
    """A trainer of the model ``config`` that samples from servers and captures routes."""
    sglang = {"capture_routes": True, **(rollout or {}).get("sglang", {})}
    settings = {"rollout": {"engine": "sglang", "prompts_per_step": 4, **(rollout or {}), "sglang": sglang}}
    return TrainerFacts(
        job=schema.from_dict(JobSettings, settings | other),
        hf_config=config,
        task_vocab_size=37,
        stop_token_ids=(1,),
        longest_prompt=12,
    )


def good() -> Facts:
    """A server and a trainer that suit each other."""
    served = server("good_moe")
    assert served.model_config is not None
    return Facts(served, trainer(served.model_config))


def with_flags(facts: Facts, **flags: Any) -> Facts:
    return replace(facts, server=replace(facts.server, server_info={**facts.server.server_info, **flags}))


def with_server(facts: Facts, **fields: Any) -> Facts:
    return replace(facts, server=replace(facts.server, **fields))


def with_model(facts: Facts, **fields: Any) -> Facts:
    """The served model's configuration differs from the trained one."""
    assert facts.server.model_config is not None
    return with_server(facts, model_config={**facts.server.model_config, **fields})


def with_trainer(facts: Facts, **fields: Any) -> Facts:
    return replace(facts, trainer=replace(facts.trainer, **fields))


def with_rollout(facts: Facts, **fields: Any) -> Facts:
    assert facts.trainer.job is not None
    job = facts.trainer.job
    return with_trainer(facts, job=replace(job, rollout=replace(job.rollout, **fields)))


def with_sglang(facts: Facts, **fields: Any) -> Facts:
    assert facts.trainer.job is not None
    return with_rollout(facts, sglang=replace(facts.trainer.job.rollout.sglang, **fields))


def with_answer(facts: Facts, probe: str, output_ids: list[int] | None = None, **meta: Any) -> Facts:
    """Fields of an answer changed; a value of None takes the field out."""
    asked = facts.server.probes[probe]
    assert asked.body is not None
    fields = {k: v for k, v in {**asked.body["meta_info"], **meta}.items() if v is not None}
    body = {"output_ids": asked.output_ids if output_ids is None else output_ids, "meta_info": fields}
    return with_server(facts, probes={**facts.server.probes, probe: replace(asked, body=body)})
