"""How a job is divided over its cluster: whether it can be and fits the GPUs, and the text of a dry run."""

import shlex
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rc import schema
from megatron_rc.launch import layout, memory
from megatron_rc.launch.layout import Command, Options
from megatron_rc.models.config import hf_config_dict, moe_layers
from megatron_rc.models.layout import check_context, check_model, check_processes
from megatron_rc.settings import combinations
from megatron_rc.settings.job import JobSettings
from megatron_rc.settings.model import ModelSettings
from megatron_rc.tasks.registry import TASKS


@dataclass(frozen=True, kw_only=True)
class Division:
    """A job on a cluster, checked."""

    settings: JobSettings
    hf: dict[str, Any] = field(repr=False)

    @property
    def train_gpus(self) -> int:
        return sum(map(len, layout.nodes_of(self.settings.cluster)))

    @property
    def data_size(self) -> int:
        parallel = self.settings.parallel
        return self.train_gpus // (parallel.tensor * parallel.pipeline)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        task = self.settings.task
        return schema.from_dict(TASKS[task.kind].options, dict(task.options), where="task.options").longest_prompt

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
        return memory.server_memory(self.settings, self.hf)

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


def divided(settings: JobSettings) -> Division:
    """A job divided over its cluster; raises ValueError, naming the fields, when its GPUs cannot be divided so."""
    division = Division(settings=settings, hf=_hf_config(settings.model))
    parallel, rollout, cluster, hf = settings.parallel, settings.rollout, settings.cluster, division.hf
    serving = cluster.serve_gpus
    if serving and not rollout.kind.has_servers:
        raise ValueError(f"cluster.serve_gpus must be 0 when rollout.engine is {rollout.engine!r}, got {serving}")
    if layout.warm_folder(settings) and cluster.nodes > 1:
        raise ValueError("model.hf_path must name a checkpoint on every node, for the servers to start from")
    check_processes(parallel, division.train_gpus)
    check_model(hf, parallel)
    combinations.check(settings, ranks=division.data_size)
    for rank, training in enumerate(layout.nodes_of(cluster)):
        if len(training) % parallel.tensor:
            got = f"{parallel.tensor} and {len(training)} on node {rank}"
            raise ValueError(f"parallel.tensor must divide the GPUs that train on a node, got {got}")
    if serving:
        _check_server(hf, cluster.server_tp)
    check_context(hf, prompt=division.longest_prompt, max_new_tokens=rollout.max_new_tokens)
    return division


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


def print_dry_run(settings: JobSettings, options: Options) -> None:
    """Print a job's layout, GiB per GPU and commands; raises ValueError when it cannot be divided or does not fit."""
    division, cluster = divided(settings), settings.cluster
    lines = [*_layout_lines(division), "", *_memory_lines(division)]
    if cluster.serve_gpus:
        lines += ["", *_server_lines(division)]
    if settings.rollout.kind.has_servers:
        lines += ["", _saved_line(division)]
    lines += ["", "starts:" if cluster.nodes == 1 else "starts in a Slurm job:"]
    for environment, words in _commands(settings, options):
        lines.append("  " + " ".join([*(f"{k}={v}" for k, v in environment.items()), shlex.join(words)]))
    print(*lines, sep="\n")
    division.check_memory()


def _commands(settings: JobSettings, options: Options) -> list[Command]:
    cluster = settings.cluster
    if cluster.nodes > 1:
        template = f"launch/train{'_sglang' * (cluster.serve_gpus > 0)}.sbatch"
        words = ["sbatch", f"--nodes={cluster.nodes}", f"--gpus-per-node={cluster.gpus_per_node}", template]
        train = {"TRAIN_OPTIONS": shlex.quote(" ".join(options.train_options))} if options.train_options else {}
        flags = shlex.join([*shlex.split(cluster.server_flags), *options.server_flags])
        serve = ["--set", f"cluster.server_flags={flags}"] if options.server_flags else []
        return [Command(train, [*words, str(options.recipe), *options.sets, *serve])]
    warm_up, servers, doctor, trainer = layout.starts_of(settings, options)
    return [command for command in (warm_up, *(server.command for server in servers), doctor, trainer) if command]


def _layout_lines(division: Division) -> list[str]:
    hf, parallel, rollout = division.hf, division.settings.parallel, division.settings.rollout
    tokens, micro_batches = division.micro_batch
    model = Path(division.settings.model.hf_path or "random weights").name
    lines = [
        f"model     {model}: {memory.parameter_count(hf):,} parameters, {hf['num_hidden_layers']} layers, "
        f"{division.settings.train.dtype}",
        f"trainer   {division.train_gpus} GPUs = tensor {parallel.tensor} x pipeline {parallel.pipeline} x data "
        f"{division.data_size}" + (f", experts over {parallel.expert}" if any(moe_layers(hf)) else ""),
        f"step      {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt}, a prompt of at most "
        f"{division.longest_prompt:,} and a response of at most {rollout.max_new_tokens:,} tokens",
        f"          at most {micro_batches} micro-batches of at most {tokens:,} tokens per optimizer step and rank",
    ]
    gpus = range(division.settings.cluster.gpus_per_node)
    for rank, training in enumerate(layout.nodes_of(division.settings.cluster)):
        uses = [f"GPUs {_span(training)} train"] if training else []
        if serving := gpus[len(training) :]:
            count, size = len(serving) // division.settings.cluster.server_tp, division.settings.cluster.server_tp
            uses.append(f"GPUs {_span(serving)} serve ({count} server{'s' * (count > 1)} of {size})")
        lines.append(f"node {rank:<4} {', '.join(uses)}")
    return lines


def _span(gpus: range) -> str:
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"


def _row(name: str, *values: int, note: str = "") -> str:
    return f"  {name:<18}" + "".join(f"{value / memory.GIB:10.1f}" for value in values) + note


def _memory_lines(division: Division) -> list[str]:
    stages = division.trainer_memory()
    names = dict.fromkeys(name for one in (stages[0], stages[-1]) for name, size in asdict(one).items() if size)
    return [
        "GiB of a trainer GPU" + "".join(f"{f'stage {i}':>10}" for i in range(len(stages))),
        *(_row(name.replace("_", " "), *(getattr(stage, name) for stage in stages)) for name in names),
        _row("peak", *(stage.total for stage in stages), note=f"   of {division.settings.cluster.gpu_memory:g}"),
        "  peak = weights, gradients, optimizer, reserved + the larger of the optimizer's step and the rest",
    ]


def _server_lines(division: Division) -> list[str]:
    server, rollout, cluster = division.server_memory(), division.settings.rollout, division.settings.cluster
    servers = cluster.serve_gpus // cluster.server_tp
    wanted = -(-rollout.prompts_per_step * rollout.samples_per_prompt // servers)
    at_once = server.tokens // division.longest
    sequences = f"{at_once} longest sequences at once of the {wanted} that a step sends to a server"
    room = f"   {server.tokens:,} tokens of {server.kv_token / 1024:.0f} KiB: {sequences}"
    share = f"   of {cluster.gpu_memory:g} (--mem-fraction-static {cluster.server_share:g})"
    return [
        "GiB of a serving GPU",
        _row("weights", server.weights),
        _row("cache", server.kv_cache, note=room),
        _row("together", server.weights + server.kv_cache, note=share),
    ]


def _saved_line(division: Division) -> str:
    """What the other value of train.head would cost or save on the last stage."""
    train = division.settings.train
    either = replace(train, head="logits", head_chunk=None, head_logits_dtype=None), replace(train, head="linear")
    divisions = (replace(division, settings=replace(division.settings, train=one)) for one in either)
    logits, linear = (each.trainer_memory()[-1].logits for each in divisions)
    verb = "saves" if train.head == "linear" else "would save"
    return f"train.head=linear {verb} {(logits - linear) / memory.GIB:.1f} GiB of the last stage's logits"
