"""train_rl.py of Megatron-LM on CPU: its own rollout preparation, forward step, loss and training step.

The process has the stand-ins of on_cpu. The inference engine is stood in for by rollouts whose tokens and log-probs are
drawn here; everything else is the source tree's. It takes the flags of train_rl.py:

    torchrun --nproc_per_node 2 -m megatron_rc patch --rc-preset token-tis rl_job.py FLAGS

RL_JOB_CASES, JSON of name -> Case, runs several in turn, each patched for itself. The last rank writes what it saw to
the JSON file that RL_JOB_OUT names.
"""

import itertools
import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpt_builders import gpt_builder
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.inference.utils import add_inference_args
from megatron.rl import rl_utils
from megatron.rl.types import RolloutGroup, TokenRollout
from megatron.training import global_vars, training
from megatron.training.arguments import parse_args, validate_args
from megatron.training.initialize import initialize_megatron
from model_provider import model_provider
from train_rl import forward_step

from megatron_rc import patch, schema
from megatron_rc.integrations.run_script import PatchSettings

VOCABULARY = 30
PAD, EOD, PROMPT = 1, 2, 3


@dataclass
class Case:
    """One training run."""

    patch: dict[str, Any] | None = None
    """PatchSettings, to be patched in for this run alone."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the host that differ from its command line."""
    length: int | None = None
    """Tokens per answer, so that micro-batches weigh the same to the host; None: 3 to 11 tokens."""
    missing: int = 0
    """Log-probs that the sampler leaves out at the end of every answer."""
    stale: bool = False
    """Every second answer begins with a token of the policy two iterations ago; the rest is of the policy before."""


def rollouts(groups: int, size: int, seed: int, case: Case) -> list[RolloutGroup]:
    """Random answers to random prompts, with log-probs near those of a uniform policy."""
    draw, numbers = torch.Generator().manual_seed(seed), itertools.count()

    def one() -> TokenRollout:
        length = case.length or int(torch.randint(3, 12, (), generator=draw))
        tokens = torch.randint(EOD + 1, VOCABULARY, (PROMPT + length - 1,), generator=draw).tolist()
        logprobs = (torch.randn(length, generator=draw) * 0.3 - 3.4).tolist()
        return TokenRollout(
            trajectory=[[*tokens, EOD]], generation_mask=[[False] * PROMPT + [True] * length],
            logprobs=[logprobs[: length - case.missing]], reward=float(torch.rand((), generator=draw)),
            env_id="arithmetic", completion_ids=[f"{seed}/{next(numbers)}"] if case.stale else [],
        )  # fmt: skip

    return [RolloutGroup(rollouts=[one() for _ in range(size)]) for _ in range(groups)]


def ledger(answers: list[RolloutGroup], iteration: int) -> dict[str, Any]:
    """Records of the requests of a stale case."""
    names = [name for group in answers for answer in group for name in answer.completion_ids]
    of_stale = [(0, iteration - 2), (PROMPT + 1, iteration - 1)]
    epochs = {name: [(0, iteration)] if number % 2 else of_stale for number, name in enumerate(names)}
    return {name: SimpleNamespace(policy_epoch=at, kv_cache_epoch=at, num_evictions=0) for name, at in epochs.items()}


def start() -> Any:
    """Arguments, process groups and globals, as train_rl.py has them; without a tokenizer of files."""
    args = parse_args(add_inference_args)
    args.tokenizer_type, args.padded_vocab_size, args.vocab_size = None, VOCABULARY + 2, VOCABULARY
    validate_args(args, {})
    global_vars.set_global_variables(args, build_tokenizer=False)
    initialize_megatron()
    tokenizer = SimpleNamespace(eod=EOD, pad=PAD, bos=None, library="none", vocab_size=VOCABULARY, detokenize=str)
    global_vars._GLOBAL_TOKENIZER = tokenizer
    if not args.bf16:
        # megatron/rl always passes fp32_output, which only the module around a bf16 model takes
        own = GPTModel.forward
        GPTModel.forward = lambda self, *args, fp32_output=None, **inputs: own(self, *args, **inputs)
    return args


def watch_logits(widths: set[int]) -> None:
    """Note the last dimension of every tensor that goes through a tensor-parallel gather of that dimension."""
    from megatron.core.tensor_parallel import layers

    own = layers.gather_from_tensor_model_parallel_region

    def gather(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        gathered = own(tensor, *args, **kwargs)
        widths.add(gathered.shape[-1])
        return gathered

    layers.gather_from_tensor_model_parallel_region = gather


def train(args: Any, case: Case) -> dict[str, Any]:
    """A few steps from the same weights, and what was logged."""
    seeds = iter(range(1000))

    def get_environment_rollouts(model: Any, inference: Any, optimizer: Any, groups: int, size: int) -> Any:
        answers = rollouts(groups, size, next(seeds), case)
        return answers, ledger(answers, args.curr_iteration)

    rl_utils.get_environment_rollouts = get_environment_rollouts
    rl_utils.maybe_log_training_metrics = lambda **_: None
    torch.manual_seed(1)
    build = partial(model_provider, gpt_builder)
    model, optimizer, scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, build)
    config = get_model_config(model[0])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    reference = {name: value.clone() if value is not None else None for name, value in model[0].state_dict().items()}
    iterator, steps = None, []
    for iteration in range(args.train_iters):
        args.curr_iteration = 10 + iteration  # so that there are policies before the first
        with torch.no_grad():
            iterator = rl_utils.get_grpo_data_iterator(
                model, None, optimizer, iteration, reference,
                grpo_iterations=args.grpo_iterations, grpo_prompts_per_step=args.grpo_prompts_per_step,
                grpo_group_size=args.grpo_group_size, global_batch_size=args.global_batch_size,
                sequence_packing=args.rl_use_sequence_packing, is_correction=args.rl_inference_logprobs_is_correction,
                buffered_rollouts=iterator,
            )  # fmt: skip
        given = (forward_step, iterator, model, optimizer, scheduler, config, get_forward_backward_func())
        log, *_, grad_norm, _, _ = training.train_step(*given, iteration=iteration)
        rate = max(group["lr"] for group in optimizer.param_groups)
        steps.append({"log": {k: float(v) for k, v in log.items()}, "grad_norm": float(grad_norm), "lr": rate})
    return {"steps": steps, "weights": [float(parameter.double().norm()) for parameter in model[0].parameters()]}


def main() -> None:
    args, gathered = start(), set[int]()
    watch_logits(gathered)
    results = {}
    for name, fields in json.loads(os.environ.get("RL_JOB_CASES", '{"alone": {}}')).items():
        case = Case(**fields)
        gathered.clear()
        own = {argument: getattr(args, argument) for argument in case.args}
        vars(args).update(case.args)
        settings = schema.from_dict(PatchSettings, case.patch or {})
        with patch("megatron-lm", **vars(settings)) if case.patch else nullcontext():
            results[name] = {**train(args, case), "gathered": sorted(gathered)}
        vars(args).update(own)
    if dist.get_rank() == dist.get_world_size() - 1:  # of the last pipeline stage
        with open(os.environ["RL_JOB_OUT"], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
