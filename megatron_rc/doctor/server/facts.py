"""Facts about a rollout server and about the trainer that will use it."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rc.doctor.registry import Check, Finding, Known, Undecided, good
from megatron_rc.files import read_json
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.models.config import hf_config_dict
from megatron_rc.models.hf_checkpoint import number_of_experts
from megatron_rc.rollout.sglang.request import Piece, Request
from megatron_rc.settings import combinations
from megatron_rc.settings import job as settings
from megatron_rc.settings.job import JobSettings
from megatron_rc.settings.model import ModelSettings

GIVE_TRAINER = "Give the trainer's settings with --config job.yaml."
GIVE_MODEL = "Give the trainer's model with --config job.yaml or --hf-path DIR."
RUN_BESIDE = "Run doctor where the server's model directory can be read."


@dataclass(frozen=True)
class ProbeAnswer:
    """One of doctor's own requests and the server's answer to it."""

    request: Request
    body: Any = None
    """The decoded answer; None when the server refused the request."""
    refusal: str = ""
    """Why it refused, one sentence."""

    def _require_answer(self) -> None:
        if self.refusal:
            raise Undecided(f"the probe request was refused: {self.refusal}")

    def piece(self) -> Piece:
        """The answer as a job reads it; raises DamagedAnswer if a job would discard it."""
        self._require_answer()
        return self.request.piece(self.body)

    @property
    def meta(self) -> Mapping[str, Any]:
        """Everything in the answer except its tokens."""
        self._require_answer()
        if not isinstance(self.body, dict) or not isinstance(self.body.get("meta_info"), dict):
            raise Undecided("the server's answer to the probe request has no meta_info")
        return self.body["meta_info"]


@dataclass(frozen=True)
class ServerFacts:
    """Answers of one SGLang server, and the files of its model if they can be read here."""

    url: str
    server_info: Mapping[str, Any]
    """Answer of /server_info: the resolved server flags."""
    model_info: Mapping[str, Any]
    """Answer of /model_info."""
    context_length: int | None = None
    """Tokens of prompt and response together, from /v1/models."""
    paths: tuple[str, ...] | None = None
    """Endpoints of the server; None if it does not list them."""
    request_fields: tuple[str, ...] | None = None
    """Fields that /generate knows; the server silently ignores others."""
    model_config: Mapping[str, Any] | None = None
    """config.json of the served model; None if it cannot be read here."""
    generation_config: Mapping[str, Any] | None = None
    """generation_config.json of the served model; empty if the model can be read and has none."""
    is_paused: bool = False
    probes: Mapping[str, ProbeAnswer] = field(default_factory=dict)

    @property
    def flags(self) -> Known:
        return Known(self.server_info, "the server", fix="Serve with a tested SGLang version.")

    @property
    def model(self) -> Known:
        return Known(self.model_info, "the server", fix="Serve with a tested SGLang version.")

    @property
    def config(self) -> Known:
        """Comparable fields of the served model's configuration."""
        fields = None if self.model_config is None else comparable(self.model_config)
        return Known(fields, "the server's config.json", fix=RUN_BESIDE)

    @property
    def generation(self) -> Known:
        return Known(self.generation_config, "the server's generation_config.json", fix=RUN_BESIDE)

    @property
    def has_experts(self) -> bool:
        if self.model_config is not None:
            return bool(self.config.get("num_experts"))
        return "moe" in str(self.model["model_type"])

    def probe(self, name: str) -> ProbeAnswer:
        if self.is_paused:
            raise Undecided("a paused server answers no probe request", "POST /continue_generation, then try again.")
        if name not in self.probes:
            raise Undecided(f"the {name} probe request was not sent")
        return self.probes[name]


@dataclass(frozen=True)
class TrainerFacts:
    """The trainer's settings, its model, and the prompts of its task."""

    job: JobSettings | None = None
    hf_config: Mapping[str, Any] | None = None
    """Hugging Face configuration of the trained model, defaults filled in."""
    generation_config: Mapping[str, Any] | None = None
    task_vocab_size: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response for the task."""
    longest_prompt: int | None = None
    """Tokens of the longest among the first step's prompts and the held-out ones."""

    @property
    def settings(self) -> JobSettings:
        if self.job is None:
            raise Undecided("the trainer's settings are not known", GIVE_TRAINER)
        return self.job

    @property
    def config(self) -> Known:
        """Comparable fields of the trained model's configuration."""
        fields = None if self.hf_config is None else comparable(self.hf_config)
        return Known(fields, "the trainer's model configuration", fix=GIVE_MODEL)

    @property
    def truncates(self) -> bool:
        return self.settings.rollout.sampling().truncates

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and the longest response."""
        if self.longest_prompt is None:
            raise Undecided("the trainer's prompts are not known", GIVE_TRAINER)
        return self.longest_prompt + self.settings.rollout.max_new_tokens


@dataclass(frozen=True)
class Facts:
    server: ServerFacts
    trainer: TrainerFacts = field(default_factory=TrainerFacts)


def of_flags(compares: str, *rules: FlagRule) -> Check[Facts]:
    """The check of the mistakes that the server's flags show, tried in order; the first of one name has its sentence
    where there is none."""

    def look(facts: Facts) -> Finding:
        for rule in rules:
            if mistake := rule.mistake(facts.server.flags):
                return Finding("", rule.severity, mistake, rule.fix)
        return good(rules[0].good)

    return Check(rules[0].name, compares, look)


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face configuration with one name per quantity, whichever transformers version wrote it."""
    rope = config.get("rope_parameters")
    if not rope:
        rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    fields = {k: v for k, v in config.items() if not k.startswith("rope_") and k != "num_local_experts"}
    fields |= {"rope_type": rope.get("type", "default"), **{k: v for k, v in rope.items() if k != "type"}}
    fields["num_experts"] = number_of_experts(config)
    if not fields.get("head_dim") and "hidden_size" in fields and "num_attention_heads" in fields:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    fields["dtype"] = config.get("dtype") or config.get("torch_dtype")
    return fields


def eos_ids(*configs: Mapping[str, Any] | None) -> set[int]:
    """All end tokens that the configurations name."""
    named = [(config or {}).get("eos_token_id") for config in configs]
    lists = [value if isinstance(value, list) else [value] for value in named if value is not None]
    return set(itertools.chain.from_iterable(lists))


def read_trainer(config: Path | None, hf_path: str | None, assignments: Sequence[str] = ()) -> TrainerFacts:
    """Facts from the trainer's YAML, in which ``assignments`` change fields, and its model directory.

    Raises ValueError where the trainer would refuse a setting, the model or the task.
    """
    if config is None:
        if hf_path is None:
            return TrainerFacts()
        model = ModelSettings(hf_path=hf_path)
        return TrainerFacts(hf_config=hf_config_dict(model), generation_config=_generation_config(hf_path))
    from megatron_rc.tasks.registry import build_task

    model_change = [] if hf_path is None else [f"model.hf_path={json.dumps(hf_path)}"]
    job = settings.load(config, [*assignments, *model_change])
    combinations.check(job)
    task = build_task(job.task.kind, job.task.options, seed=job.train.seed, tokenizer=job.model.hf_path)
    prompts = [*task.prompts(0, job.rollout.prompts_per_step), *task.eval_prompts()]
    return TrainerFacts(
        job=job,
        hf_config=hf_config_dict(job.model),
        generation_config=_generation_config(job.model.hf_path),
        task_vocab_size=task.vocab_size,
        stop_token_ids=task.stop_token_ids,
        longest_prompt=max((len(p.token_ids) for p in prompts), default=0),
    )


def _generation_config(hf_path: str | None) -> dict[str, Any] | None:
    path = Path(hf_path or "") / "generation_config.json"
    return read_json(path) if hf_path and path.is_file() else None
