"""Responses of several turns: the policy writes, the environment replies, and no token is ever tokenized again."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron_rc.engine import OnFinished, RolloutEngine, Sample, SamplingParams, joined_spans
from megatron_rc.tasks import Prompt, Task
from megatron_rc.training.step.seeds import seed_of


def respond(
    engine: RolloutEngine,
    task: Task,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    seeds: Sequence[int],
    on_finished: OnFinished = None,
) -> list[Sample]:
    """Sample ``n`` responses per prompt, in as many turns as ``task`` wants; the contract is RolloutEngine.generate.

    All responses take their turns together. The seed of a response is that of its first turn, and the seeds of its
    later turns follow from it. A response that wants to go on after ``task.max_turns``, or without room for a reply
    and a whole turn within ``params.max_new_tokens``, is cut off there with finish reason "length".

    Raises:
        ValueError: ``params.max_new_tokens`` is less than a turn, or what the engine refuses.
    """
    ids = [prompt.token_ids for prompt in prompts]
    if task.max_turns == 1:
        return engine.generate(ids, params, n=n, seeds=seeds, on_finished=on_finished)
    if params.max_new_tokens < task.max_turn_tokens:
        least, given = task.max_turn_tokens, params.max_new_tokens
        raise ValueError(f"rollout.max_new_tokens must be >= the {least} tokens of a turn of the task, got {given}")
    of_turn = dataclasses.replace(params, max_new_tokens=task.max_turn_tokens)
    samples = engine.generate(ids, of_turn, n=n, seeds=seeds)
    waiting = list(range(len(samples)))
    while True:
        replies = {i: _reply(task, prompts[i // n], samples[i], params) for i in waiting}
        ended, waiting = len(waiting), [i for i in waiting if replies[i]]
        if on_finished is not None and ended > len(waiting):
            on_finished(ended - len(waiting))
        if not waiting:
            return samples
        so_far = [[*samples[i].prompt_ids, *samples[i].output_ids, *replies[i]] for i in waiting]
        its_seeds = [seed_of(seeds[i], "turn", turns_of(samples[i])) for i in waiting]
        for i, turn in zip(waiting, engine.generate(so_far, of_turn, n=1, seeds=its_seeds), strict=True):
            samples[i] = joined(samples[i], replies[i], turn)


def turns_of(sample: Sample) -> int:
    """How many turns a sample has: runs of tokens that the policy drew."""
    mask = sample.output_mask or [True] * len(sample.output_ids)
    return sum(drawn and not before for drawn, before in zip(mask, [False, *mask[:-1]], strict=True))


def joined(sample: Sample, reply: Sequence[int], turn: Sample) -> Sample:
    """``sample``, the ``reply`` to it, and the next ``turn``, whose prompt is all tokens before it.

    Tokens of the reply have output_mask False, log-prob 0, no kept ids but themselves, and the version of the weights
    before them. Routes are those of the request that drew the token; the next request has those of the reply.
    """
    drawn, start = len(sample.output_ids), len(sample.output_ids) + len(reply)
    support, routes = None, None
    if sample.support is not None and turn.support is not None:
        support = [*sample.support, *([token] for token in reply), *turn.support]
    if sample.routes is not None and turn.routes is not None:
        routes = torch.cat([sample.routes, turn.routes[len(sample.routes) :]])
    top: list[torch.Tensor | None] = [None, None]
    if sample.top_ids is not None and turn.top_ids is not None:
        assert sample.top_rollout_logprobs is not None and turn.top_rollout_logprobs is not None
        around = (0, 0, 0, len(reply))
        top = [torch.cat([F.pad(sample.top_ids, around, value=-1), turn.top_ids])]
        top.append(torch.cat([F.pad(sample.top_rollout_logprobs, around), turn.top_rollout_logprobs]))
    cached = [count for count in (sample.cached_tokens, turn.cached_tokens) if count is not None]
    return Sample(
        prompt_ids=sample.prompt_ids,
        output_ids=[*sample.output_ids, *reply, *turn.output_ids],
        logprobs=[*sample.logprobs, *[0.0] * len(reply), *turn.logprobs],
        finish_reason=turn.finish_reason,
        weight_versions=joined_spans(sample.weight_versions, start, turn.weight_versions),
        support=support,
        top_ids=top[0],
        top_rollout_logprobs=top[1],
        output_mask=[*(sample.output_mask or [True] * drawn), *[False] * len(reply), *[True] * len(turn.output_ids)],
        routes=routes,
        retractions=sample.retractions + turn.retractions,
        server=turn.server,
        syncs=turn.syncs,
        cached_tokens=max(cached, default=None),
        discarded=turn.discarded,
        discarded_detail=turn.discarded_detail,
    )


def _reply(task: Task, prompt: Prompt, sample: Sample, params: SamplingParams) -> Sequence[int]:
    """What the environment writes after ``sample``, which is marked where the limits leave no room for it."""
    if sample.discarded is not None or sample.finish_reason != "stop":
        return ()
    reply = task.reply(prompt, sample.output_ids)
    longest = len(sample.output_ids) + len(reply) + task.max_turn_tokens
    if reply and (turns_of(sample) == task.max_turns or longest > params.max_new_tokens):
        sample.finish_reason = "length"
        return ()
    return reply
