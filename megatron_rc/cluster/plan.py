"""The plan of a job on its cluster: whether it can be divided and fits the GPUs, and the text of a dry run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rc import schema
from megatron_rc.cluster import layout, memory, step_time
from megatron_rc.cluster.layout import Node, Options
from megatron_rc.models.config import hf_config_dict, moe_layers
from megatron_rc.models.layout import check_model, check_processes
from megatron_rc.settings import JobSettings, ModelSettings
from megatron_rc.tasks.registry import OPTIONS


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job on a cluster, checked."""

    settings: JobSettings
    hf: dict[str, Any] = field(repr=False)

    @property
    def nodes(self) -> list[Node]:
        return layout.nodes_of(self.settings.cluster)

    @property
    def train_gpus(self) -> int:
        return sum(node.training for node in self.nodes)

    @property
    def data_size(self) -> int:
        parallel = self.settings.parallel
        return self.train_gpus // (parallel.tensor * parallel.pipeline)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        task = self.settings.task
        options = schema.from_dict(OPTIONS[task.kind], dict(task.options), where="task.options")
        return options.longest_prompt

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self.longest_prompt + self.settings.rollout.max_new_tokens

    @property
    def micro_batch(self) -> tuple[int, int]:
        """(tokens of the largest micro-batch, micro-batches of an optimizer step when all responses are longest)."""
        train, rollout = self.settings.train, self.settings.rollout
        sequences = rollout.prompts_per_step * rollout.samples_per_prompt
        share = -(-sequences // (train.mini_batches_per_rollout * self.data_size))
        if train.micro_batches:
            return -(-share // train.micro_batches) * self.longest, train.micro_batches
        tokens = min(max(train.max_tokens_per_microbatch, self.longest), share * self.longest)
        return tokens, -(-share * self.longest // tokens)

    def trainer_memory(self) -> list[memory.TrainerMemory]:
        """One GPU of every pipeline stage."""
        tokens, count = self.micro_batch
        return [
            memory.trainer_memory(self.settings, self.hf, tokens=tokens, stage=stage, micro_batches=count)
            for stage in range(self.settings.parallel.pipeline)
        ]

    def server_memory(self) -> memory.ServerMemory:
        cluster, dtype = self.settings.cluster, self.settings.train.dtype
        tensor, gpu, share = cluster.server_tp, round(cluster.gpu_memory * memory.GIB), cluster.server_share
        return memory.server_memory(self.hf, dtype, tensor=tensor, gpu=gpu, share=share)

    def step(self) -> step_time.Step:
        """What one step does when every response is longest."""
        rollout, train, cluster = self.settings.rollout, self.settings.train, self.settings.cluster
        three_policy, linear = self.settings.correction.old == "recompute", train.head == "linear"
        silent = three_policy + (self.settings.loss.kl_coef > 0)
        return step_time.Step(
            hf=self.hf,
            parallel=self.settings.parallel,
            train_gpus=self.train_gpus,
            servers=cluster.serve_gpus // cluster.server_tp,
            server=self.server_memory(),
            server_tp=cluster.server_tp,
            sequences=rollout.prompts_per_step * rollout.samples_per_prompt,
            prompt=self.longest_prompt,
            response=rollout.max_new_tokens,
            tokens=self.micro_batch[0],
            passes=(silent, 1),
            optimizer_steps=train.mini_batches_per_rollout,
            leaves_out=linear,
            recomputed=linear and not three_policy,
            dtype=train.dtype,
        )

    def check_memory(self) -> None:
        """Raises ValueError when the estimate says that the job does not fit."""
        cluster = self.settings.cluster
        for stage, needed in enumerate(self.trainer_memory()):
            if needed.total > cluster.gpu_memory * memory.GIB:
                raise ValueError(
                    f"a trainer GPU of pipeline stage {stage} needs about {needed.total / memory.GIB:.1f} GiB of "
                    f"{cluster.gpu_memory:g} (cluster.gpu_memory): raise parallel.tensor, pipeline or expert, lower "
                    "train.max_tokens_per_microbatch or rollout.max_new_tokens, or take larger GPUs"
                )
        if cluster.serve_gpus and (server := self.server_memory()).tokens < self.longest:
            weights = f"a serving GPU holds {server.weights / memory.GIB:.1f} GiB of weights"
            cache = f"a cache of {server.tokens:,} tokens, less than one sequence of {self.longest:,}"
            raise ValueError(f"{weights} and {cache}: raise cluster.server_tp")


def make_plan(settings: JobSettings) -> Plan:
    """The plan of a job; raises ValueError, naming the fields, when its cluster's GPUs cannot be divided this way."""
    plan = Plan(settings=settings, hf=_hf_config(settings.model))
    parallel, rollout, cluster, hf = settings.parallel, settings.rollout, settings.cluster, plan.hf
    serving = cluster.serve_gpus
    if serving and rollout.engine != "sglang":
        raise ValueError(f"cluster.serve_gpus must be 0 when rollout.engine is {rollout.engine!r}, got {serving}")
    if layout.warm_folder(settings) and cluster.nodes > 1:
        raise ValueError("model.hf_path must name a checkpoint on every node, for the servers to start from")
    check_processes(parallel, plan.train_gpus)
    check_model(hf, parallel)
    for rank, node in enumerate(plan.nodes):
        if node.training % parallel.tensor:
            got = f"{parallel.tensor} and {node.training} on node {rank}"
            raise ValueError(f"parallel.tensor must divide the GPUs that train on a node, got {got}")
    if serving:
        _check_server(hf, cluster.server_tp)
    if plan.longest > (context := hf["max_position_embeddings"]):
        longest = f"rollout.max_new_tokens={rollout.max_new_tokens} after a prompt of {plan.longest_prompt} tokens"
        raise ValueError(f"{longest} is longer than the model's context (max_position_embeddings) of {context}")
    return plan


def _check_server(hf: dict[str, Any], tensor: int) -> None:
    for name in ("num_attention_heads", "moe_intermediate_size" if any(moe_layers(hf)) else "intermediate_size"):
        if hf[name] % tensor:
            raise ValueError(f"{name} must be divisible by cluster.server_tp, got {hf[name]} and {tensor}")
    shared, rule = hf["num_key_value_heads"], "must divide num_key_value_heads or be a multiple of it"
    if shared % tensor and tensor % shared:
        raise ValueError(f"cluster.server_tp {rule}, got {tensor} and {shared}")


def _hf_config(model: ModelSettings) -> dict[str, Any]:
    """The configuration of the checkpoint where there is one, else of the settings; both must be the same model."""
    if model.hf_path is None or (model.config and not (Path(model.hf_path) / "config.json").is_file()):
        return hf_config_dict(ModelSettings(config=model.config))
    stored = hf_config_dict(ModelSettings(hf_path=model.hf_path))
    if model.config:
        stated = hf_config_dict(ModelSettings(config=model.config))
        for name in model.config:
            if name in stored and stored[name] != stated[name]:
                values = f"its {name} is {stored[name]!r}, not {stated[name]!r}"
                raise ValueError(f"{model.hf_path} is not the model of model.config: {values}")
    return stored


def describe(plan: Plan, options: Options) -> str:
    """The text of a dry run: the layout, GiB per GPU, and each node's commands."""
    settings = plan.settings
    lines = [*_layout_lines(plan, options), "", *_memory_lines(plan)]
    if settings.cluster.serve_gpus:
        lines += ["", *_server_lines(plan)]
    if settings.rollout.engine == "sglang":
        # what the embedded engine samples for is small, and runs where there is no such card
        lines += ["", *_time_lines(plan)]
    every = [layout.servers_of(settings, rank, options) for rank in range(settings.cluster.nodes)]
    urls = [server.url for servers in every for server in servers]
    for rank, servers in enumerate(every):
        commands = [*(server.command for server in servers), layout.trainer_of(settings, rank, options, urls)]
        if rank == 0:
            commands.insert(0, layout.warm_up_of(settings, options))
            commands.insert(-1, layout.doctor_of(settings, options, urls))
        lines += ["", f"node {rank} ({options.hosts[rank]}) starts:"]
        for environment, words in filter(None, commands):
            lines.append("  " + " ".join([*(f"{k}={v}" for k, v in environment.items()), shlex.join(words)]))
    return "\n".join(lines)


def _layout_lines(plan: Plan, options: Options) -> list[str]:
    hf, parallel, rollout = plan.hf, plan.settings.parallel, plan.settings.rollout
    tokens, micro_batches = plan.micro_batch
    model = Path(plan.settings.model.hf_path or "random weights").name
    lines = [
        f"model     {model}: {memory.parameter_count(hf):,} parameters, {hf['num_hidden_layers']} layers, "
        f"{plan.settings.train.dtype}",
        f"trainer   {plan.train_gpus} GPUs = tensor {parallel.tensor} x pipeline {parallel.pipeline} x data "
        f"{plan.data_size}" + (f", experts over {parallel.expert}" if any(moe_layers(hf)) else ""),
        f"step      {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt}, a prompt of at most "
        f"{plan.longest_prompt:,} and a response of at most {rollout.max_new_tokens:,} tokens",
        f"          at most {micro_batches} micro-batches of at most {tokens:,} tokens per optimizer step and rank",
    ]
    for rank, node in enumerate(plan.nodes):
        uses = [f"GPUs {_span(range(node.training))} train"] if node.training else []
        if node.serving:
            count, span = len(node.servers), _span(range(node.training, node.gpus))
            uses.append(f"GPUs {span} serve ({count} server{'s' * (count > 1)} of {node.server_tp})")
        lines.append(f"node {rank:<4} {options.hosts[rank]}: {', '.join(uses)}")
    return lines


def _span(gpus: range) -> str:
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"


def _row(name: str, *values: int, note: str = "") -> str:
    return f"  {name:<18}" + "".join(f"{value / memory.GIB:10.1f}" for value in values) + note


def _memory_lines(plan: Plan) -> list[str]:
    stages = plan.trainer_memory()
    names = memory.by_name(stages[0]) | memory.by_name(stages[-1])
    return [
        "GiB of a trainer GPU" + "".join(f"{f'stage {i}':>10}" for i in range(len(stages))),
        *(_row(name.replace("_", " "), *(getattr(stage, name) for stage in stages)) for name in names),
        _row("peak", *(stage.total for stage in stages), note=f"   of {plan.settings.cluster.gpu_memory:g}"),
        "  peak = weights, gradients, optimizer, reserved + the larger of the optimizer's step and the rest",
    ]


def _server_lines(plan: Plan) -> list[str]:
    server, rollout, cluster = plan.server_memory(), plan.settings.rollout, plan.settings.cluster
    wanted = -(-rollout.prompts_per_step * rollout.samples_per_prompt // sum(len(node.servers) for node in plan.nodes))
    sequences = (
        f"{server.tokens // plan.longest} longest sequences at once of the {wanted} that a step sends to a server"
    )
    room = f"   {server.tokens:,} tokens of {server.kv_token / 1024:.0f} KiB: {sequences}"
    share = f"   of {cluster.gpu_memory:g} (--mem-fraction-static {cluster.server_share:g})"
    return [
        "GiB of a serving GPU",
        _row("weights", server.weights),
        _row("cache", server.kv_cache, note=room),
        _row("together", server.weights + server.kv_cache, note=share),
    ]


def _time_lines(plan: Plan) -> list[str]:
    step, card = plan.step(), step_time.card_of(plan.settings.cluster.gpu_memory)
    seconds = step_time.step_seconds(step, step_time.Ceilings.of(card))
    together = sum(seconds.values())
    return [
        f"predicted seconds of a step of longest responses, every part at the ceiling of an {card.name}; not measured",
        *(f"  {name:<20}{value:10.3f}{100 * value / together:8.2f} %" for name, value in seconds.items()),
        f"  {'together':<20}{together:10.3f}",
        _saved_line(plan),
    ]


def _saved_line(plan: Plan) -> str:
    """What the other value of train.head would cost or save on the last stage."""
    train = plan.settings.train
    either = replace(train, head="logits", head_chunk=None, head_logits_dtype=None), replace(train, head="linear")
    logits, linear = (
        replace(plan, settings=replace(plan.settings, train=one)).trainer_memory()[-1].logits for one in either
    )
    verb = "saves" if train.head == "linear" else "would save"
    return f"train.head=linear {verb} {(logits - linear) / memory.GIB:.1f} GiB of the last stage's logits"
