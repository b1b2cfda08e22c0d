"""Recorded facts of two servers, trainers that suit them, and changes that make a defect of them."""

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rc import schema
from megatron_rc.doctor.server.examine import SGLANG
from megatron_rc.doctor.server.facts import Facts, ProbeAnswer, ServerFacts, TrainerFacts
from megatron_rc.doctor.server.probe import probe_request
from megatron_rc.rollout.sglang.request import RouteShape
from megatron_rc.settings.job import JobSettings

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/sglang_facts.json").read_text())

Change = Callable[[Facts], Facts]


@dataclass(frozen=True)
class Defect:
    """A change of ``good()`` that a check must find, with a part of its sentence as error, warning or note."""

    check: str
    change: Change
    error: str = ""
    warning: str = ""
    note: str = ""
    fix: str = ""
    """A part of the sentence that says how to mend it."""

    def assert_found(self) -> None:
        finding = SGLANG[self.check].run(self.change(good()))
        assert finding.decided and finding.fix and self.fix in finding.fix, finding
        expected = {name: part for name in ("error", "warning", "note") if (part := getattr(self, name))}
        assert list(expected) == [finding.status] and expected[finding.status] in finding.found, finding
        for sentence in (finding.found, finding.fix):
            assert not re.search(r"\. [A-Z]", sentence), f"more than one sentence: {sentence}"

    def __str__(self) -> str:
        return self.check


def server(kind: str) -> ServerFacts:
    """A recorded server: good_moe has every flag a job needs; bad_dense was started with many that harm it."""
    fields = copy.deepcopy(RECORDED[kind])
    routes = RouteShape.of(fields["model_config"]) if fields["server_info"]["enable_return_routed_experts"] else None
    probes = {}
    for name, body in fields.pop("probes").items():
        request = probe_request(name, routes)
        body["meta_info"]["id"] = request.rid
        probes[name] = ProbeAnswer(request, body)
    return ServerFacts(**fields, probes=probes)


def trainer(config: Mapping[str, Any], rollout: Mapping[str, Any] | None = None, **other: Any) -> TrainerFacts:
    """A trainer of the model ``config`` that samples from servers and captures routes."""
    sglang = {"capture_routes": True, **(rollout or {}).get("sglang", {})}
    settings = {"rollout": {"engine": "sglang", "prompts_per_step": 4, **(rollout or {}), "sglang": sglang}}
    job = schema.from_dict(JobSettings, settings | other)
    return TrainerFacts(job=job, hf_config=config, task_vocab_size=37, stop_token_ids=(1,), longest_prompt=12)


def good() -> Facts:
    """A server and a trainer that suit each other."""
    served = server("good_moe")
    return Facts(served, trainer(served.model_config))


def both(*changes: Change) -> Change:
    return lambda facts: functools.reduce(lambda changed, change: change(changed), changes, facts)


def served(**fields: Any) -> Change:
    return lambda facts: replace(facts, server=replace(facts.server, **fields))


def flags(**fields: Any) -> Change:
    return lambda facts: served(server_info={**facts.server.server_info, **fields})(facts)


def info(**fields: Any) -> Change:
    return lambda facts: served(model_info={**facts.server.model_info, **fields})(facts)


def model(**fields: Any) -> Change:
    return lambda facts: served(model_config={**(facts.server.model_config or {}), **fields})(facts)


def trained(**fields: Any) -> Change:
    return lambda facts: replace(facts, trainer=replace(facts.trainer, **fields))


def rollout(**fields: Any) -> Change:
    """Other settings of the job's section rollout."""
    return lambda f: trained(job=replace(job := f.trainer.settings, rollout=replace(job.rollout, **fields)))(f)


def sglang(**fields: Any) -> Change:
    return lambda facts: rollout(sglang=replace(facts.trainer.settings.rollout.sglang, **fields))(facts)


def answer(name: str, output_ids: list[int] | None = None, **meta: Any) -> Change:
    """Other fields in the answer to one probe request; None takes a field out."""

    def change(facts: Facts) -> Facts:
        probe = facts.server.probes[name]
        fields = {k: v for k, v in {**probe.meta, **meta}.items() if v is not None}
        body = {"output_ids": output_ids or probe.body["output_ids"], "meta_info": fields}
        return with_probe(facts, name, body=body)

    return change


def refused_probe(name: str) -> Change:
    return lambda facts: with_probe(facts, name, body=None, refusal="it answered 400: top_k is too large")


def with_probe(facts: Facts, name: str, **fields: Any) -> Facts:
    probes = facts.server.probes
    return served(probes={**probes, name: replace(probes[name], **fields)})(facts)
