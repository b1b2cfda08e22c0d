"""The task reasoning_gym: generated problems in words and their verifiers, of the library of that name."""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megatron_rc.schema import nearest, one_line
from megatron_rc.schema.limits import check_at_least
from megatron_rc.tasks import Demonstration, Prompt, Task
from megatron_rc.tasks.chat import Chat, Template
from megatron_rc.tasks.generated import is_held_out
from megatron_rc.versions import installing

_TRIES = 40
"""Problems looked at for one that is held out; one in eight is, and datasets that have few soon repeat theirs."""
_SIZE = 2**31 - 1
"""Problems of a dataset, more than a run asks for."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymOptions:
    datasets: dict[str, Any] = field(default_factory=lambda: {"chain_sum": {}})
    """Maps a dataset of reasoning-gym to {weight: 1, config: {...}}: its share of the problems, and fields of its
    configuration, such as chain_sum: {config: {max_terms: 3}}."""
    system_prompt: str = "Answer with nothing but the result, between <answer> and </answer>."
    """Message of the system before every problem; empty: none."""
    tokenizer: str | None = None
    """Local folder of the tokenizer; null: model.hf_path."""
    chat_template: Template = "auto"
    """auto: send the problem as a user's message if the tokenizer has a chat template."""
    max_prompt_tokens: int = 512
    """Most tokens of a prompt; a longer problem is passed over."""
    held_out: int = 128
    """Held-out problems; a hash of the text decides which may be held out, for every seed."""
    seed: int = 1
    """Seed of the problems; train.seed if not given."""

    def __post_init__(self) -> None:
        check_at_least(1, max_prompt_tokens=self.max_prompt_tokens, held_out=self.held_out)
        if not self.datasets:
            raise ValueError("datasets must name at least one dataset, such as chain_sum")
        for name, given in self.datasets.items():
            if given is not None and (not isinstance(given, dict) or not given.keys() <= {"weight", "config"}):
                raise ValueError(f"datasets.{name} must be {{weight: ..., config: ...}}, got {given!r}")
            weight = self.weight_of(name)
            if not isinstance(weight, int | float) or not weight > 0:
                raise ValueError(f"datasets.{name}.weight must be > 0, got {weight!r}")

    def weight_of(self, name: str) -> Any:
        return (self.datasets[name] or {}).get("weight", 1)

    @property
    def longest_prompt(self) -> int:
        return self.max_prompt_tokens


class ReasoningGymTask(Task):
    """Problem i of a stream is a function of seed and i; a response's reward is the library's score of its answer.

    The answer of a response is what stands between its last <answer> and </answer>, or all of it without such tags.
    """

    def __init__(self, options: ReasoningGymOptions, tokenizer: str | None = None) -> None:
        """``tokenizer``: folder of the tokenizer if ``options.tokenizer`` is None; ValueError names the option."""
        self._options = options
        self._datasets = {name: _dataset(name, (given or {}).get("config")) for name, given in options.datasets.items()}
        self._chat = Chat(options.tokenizer or tokenizer, options.chat_template)
        self.stop_token_ids, self.vocab_size = self._chat.stop_token_ids, self._chat.vocab_size
        self.longest_prompt = options.max_prompt_tokens
        self._entry = lru_cache(maxsize=4096)(self._drawn_entry)
        self._held_out = self._draw_held_out()

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return [self._training("prompt", index) for index in range(start, start + count)]

    def eval_prompts(self) -> list[Prompt]:
        return list(self._held_out)

    def demonstrations(self, start: int, count: int) -> list[Demonstration]:
        """The library's own answers, in the tags that the system's message asks for."""
        found = [self._training("demonstration", index) for index in range(start, start + count)]
        texts = [f"<answer>{self._entry(prompt.answer)[1]['answer']}</answer>" for prompt in found]
        pairs = zip(found, map(self._chat.encode_response, texts), strict=True)
        return [Demonstration(list(prompt.token_ids), response) for prompt, response in pairs]

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        return [self._score(prompt, self.decode(ids)) for prompt, ids in zip(prompts, responses, strict=True)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._chat.decode(token_ids)

    def _score(self, prompt: Prompt, response: str) -> float:
        name, entry = self._entry(prompt.answer)
        tagged = response.rpartition("<answer>")[2] if "<answer>" in response else response
        answer = tagged.partition("</answer>")[0].strip()
        try:
            return float(self._datasets[name].score_answer(answer, entry))
        except (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError):
            return 0.0  # some verifiers parse what a model writes, and raise at what they cannot

    def _training(self, stream: str, index: int) -> Prompt:
        """Problem ``index`` of a stream, which is not held out."""
        rng = random.Random(f"{self._options.seed}/{stream}/{index}")
        for _ in range(8 * _TRIES):
            prompt = self._draw(rng)
            if prompt is not None and not is_held_out(prompt.text):
                return prompt
        raise ValueError(self._too_long())

    def _draw_held_out(self) -> list[Prompt]:
        rng, wanted = random.Random(f"{self._options.seed}/held-out"), self._options.held_out
        found = dict[str, Prompt]()
        for _ in range(_TRIES * wanted):
            prompt = self._draw(rng)
            if prompt is not None and is_held_out(prompt.text):
                found.setdefault(prompt.text, prompt)
            if len(found) == wanted:
                return list(found.values())
        few = f"held_out={wanted} is more than the {len(found)} held-out problems found of these datasets"
        raise ValueError(few if found else self._too_long())

    def _draw(self, rng: random.Random) -> Prompt | None:
        """Any problem; None where it is too long. Its place among all problems stands in for its answer."""
        names = list(self._datasets)
        (name,) = rng.choices(names, [self._options.weight_of(one) for one in names])
        place = f"{name}/{rng.randrange(_SIZE)}"
        text = str(self._entry(place)[1]["question"])
        (ids,) = self._chat.encode([text], self._options.system_prompt)
        fits = len(ids) <= self._options.max_prompt_tokens
        return Prompt(token_ids=tuple(ids), text=text, answer=place) if fits else None

    def _drawn_entry(self, place: str) -> tuple[str, dict[str, Any]]:
        """(name of the dataset, its entry) of the problem at ``place``."""
        name, _, index = place.rpartition("/")
        return name, self._datasets[name][int(index)]

    def _too_long(self) -> str:
        return f"max_prompt_tokens={self._options.max_prompt_tokens} has no room for the problems of these datasets"


def _dataset(name: str, config: dict[str, Any] | None) -> Any:
    """The generator of ``name``, whose entry i is a function of i."""
    try:
        with warnings.catch_warnings():
            # what Python says of the source of a dependency when it compiles it
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(f"reasoning-gym is not installed: {installing('real')}") from error
    if name not in DATASETS:
        raise ValueError(f"datasets: reasoning-gym has no {name!r}{nearest(name, DATASETS)}")
    try:
        # the seed of an entry is the sum of both: `index` alone chooses the problem
        return create_dataset(name, **{"seed": 0, "size": _SIZE, **(config or {})})
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"datasets.{name}.config: {one_line(error)}") from None
