"""A task of several turns for models of any weights, and an engine that notes what is asked of another one."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron_rc.engine import RolloutEngine, Sample, SamplingParams
from megatron_rc.tasks import Demonstration, Prompt, Task

CALLS = (20, 21, 22, 23, 24, 25)
END = 26


class CountingTask(Task):
    """After a call the environment writes how many tokens there are so far, in ids below 10 and of one or two digits.

    With six of some forty ids that call and one that ends, random weights take several turns.
    """

    vocab_size = 37
    stop_token_ids = (*CALLS, END)

    def __init__(self, max_turns: int = 4, max_turn_tokens: int = 8) -> None:
        self.max_turns, self.max_turn_tokens = max_turns, max_turn_tokens

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return [Prompt((2, 3 + i % 7, *[5 + i % 11] * (i % 5)), str(i), "") for i in range(start, start + count)]

    def eval_prompts(self) -> list[Prompt]:
        return self.prompts(0, 2)

    def demonstrations(self, start: int, count: int) -> list[Demonstration]:
        return [Demonstration([2, 3], [4, END])] * count

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        return [float(len(response)) for response in responses]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def reply(self, prompt: Prompt, response: Sequence[int]) -> list[int]:
        return [int(digit) for digit in str(len(response))] if response[-1] in CALLS else []


class NotingEngine:
    """Passes every call on, and keeps its prompts, sampling and answers; ``between`` runs before every call."""

    def __init__(self, engine: RolloutEngine, between: Callable[[int], None] = lambda call: None) -> None:
        self.engine, self.between = engine, between
        self.weight_version = engine.weight_version
        self.calls: list[tuple[list[list[int]], SamplingParams, list[Sample]]] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any) -> list[Sample]:
        self.between(len(self.calls))
        samples = self.engine.generate(prompts, params, **options)
        self.calls.append(([list(prompt) for prompt in prompts], params, list(samples)))
        return samples
