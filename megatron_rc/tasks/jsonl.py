"""The task jsonl: prompts from a file, the checkpoint's tokenizer, and a reward function of the user."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rc.tasks import Demonstration, Prompt, Task
from megatron_rc.tasks.chat import Chat, Template
from megatron_rc.tasks.reward import load_reward, score


@dataclass(frozen=True, kw_only=True)
class JsonlOptions:
    path: str
    """File of {"prompt": text, "answer": text or number} lines; other keys are ignored."""
    reward: str
    """module:function, called as function(prompt, response, answer) with three texts; returns a finite number. The
    module is a file beside the YAML or beside `path`, or anything that Python can import."""
    tokenizer: str | None = None
    """Local folder of the tokenizer; null: model.hf_path."""
    held_out_path: str | None = None
    """File of held-out prompts; null: hold out `held_out_share` of the prompts of `path`."""
    held_out_share: float = 0.05
    """Share of the prompts of `path` to hold out, at least one; selected by a hash of their text, for every seed."""
    chat_template: Template = "auto"
    """auto: send the prompt as a user's message if the tokenizer has a chat template."""
    max_prompt_tokens: int = 2048
    """Most tokens of a prompt; a longer one is an error that names its line."""
    seed: int = 1
    """Seed of the order in each epoch, which visits every prompt once; train.seed if not given."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share must be in (0, 1), got {self.held_out_share!r}")
        if self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be >= 1, got {self.max_prompt_tokens!r}")

    @property
    def longest_prompt(self) -> int:
        return self.max_prompt_tokens


class Row(NamedTuple):
    prompt: str
    answer: str
    place: str
    """File and line, for error messages."""


class JsonlTask(Task):
    """Prompts and answers of a file, scored by the user's function; ValueError names the option, or file and line."""

    def __init__(self, options: JsonlOptions, tokenizer: str | None = None) -> None:
        """``tokenizer``: folder of the tokenizer if ``options.tokenizer`` is None."""
        self._options = options
        self._reward = load_reward(options.reward)
        self._chat = Chat(options.tokenizer or tokenizer, options.chat_template)
        self.stop_token_ids, self.vocab_size = self._chat.stop_token_ids, self._chat.vocab_size

        training, held_out = _split(options)
        self._places = {(row.prompt, row.answer): row.place for row in [*training, *held_out]}
        self._training = self._prompts_of(training)
        self._held_out = self._prompts_of(held_out)
        self.longest_prompt = max(len(prompt.token_ids) for prompt in [*self._training, *self._held_out])
        self._epoch, self._order = -1, list[int]()

    def prompts(self, start: int, count: int) -> list[Prompt]:
        size = len(self._training)
        return [self._training[self._order_of(i // size)[i % size]] for i in range(start, start + count)]

    def eval_prompts(self) -> list[Prompt]:
        return list(self._held_out)

    def demonstrations(self, start: int, count: int) -> list[Demonstration]:
        raise ValueError("the jsonl task has no demonstrations: warmup.steps must be 0")

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """The values of the user's function for responses decoded without special tokens."""
        places = [self._places.get((p.text, p.answer), "a prompt that is in no file") for p in prompts]
        return [
            score(self._reward, self._options.reward, p.text, self.decode(r), p.answer, place)
            for p, r, place in zip(prompts, responses, places, strict=True)
        ]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._chat.decode(token_ids)

    def _order_of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._training)))
            random.Random(f"{self._options.seed}/epoch/{epoch}").shuffle(self._order)
        return self._order

    def _prompts_of(self, rows: Sequence[Row]) -> list[Prompt]:
        tokenized = self._chat.encode([row.prompt for row in rows])
        longest, prompts = self._options.max_prompt_tokens, []
        for row, ids in zip(rows, tokenized, strict=True):
            if len(ids) > longest:
                raise ValueError(f"{row.place}: the prompt has {len(ids)} tokens, max_prompt_tokens is {longest}")
            if not ids:
                raise ValueError(f"{row.place}: the prompt has no tokens")
            prompts.append(Prompt(token_ids=tuple(ids), text=row.prompt, answer=row.answer))
        return prompts


def read_rows(path: str, field: str) -> list[Row]:
    """The rows of the JSONL file that option ``field`` names; ValueError when it has none or a line is not a row."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{field}: no such file: {path!r}")
    with file.open(encoding="utf-8") as lines:
        try:
            rows = [_parse(line, f"{path} line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{field}: {path!r} is not UTF-8 text ({error.reason})") from None
    if not rows:
        raise ValueError(f"{field}: {path!r} has no prompts")
    return rows


def _parse(line: str, place: str) -> Row:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(data, dict):
        raise ValueError(f'{place} must be an object {{"prompt": ..., "answer": ...}}, got {type(data).__name__}')
    for key in ("prompt", "answer"):
        if key not in data:
            raise ValueError(f"{place} has no field {key!r}")
    prompt, answer = data["prompt"], data["answer"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{place}: prompt must be a text that is not empty, got {prompt!r}")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"{place}: answer must be a text or a number, got {answer!r}")
    return Row(prompt, str(answer), place)


def _split(options: JsonlOptions) -> tuple[list[Row], list[Row]]:
    """The training rows and the held-out rows, which share no prompt."""
    rows = read_rows(options.path, "path")
    if options.held_out_path is not None:
        held_out = read_rows(options.held_out_path, "held_out_path")
        known = {row.prompt for row in held_out}
        shared = [row for row in rows if row.prompt in known]
        if shared:
            also = f"{len(shared)} training prompts are also in held_out_path {options.held_out_path!r}"
            raise ValueError(f"{also}, the first at {shared[0].place}")
        return rows, held_out
    texts = {row.prompt for row in rows}
    if len(texts) < 2:
        raise ValueError(f"path: {options.path!r} has one prompt, so none can be held out; set held_out_path")
    count = min(len(texts) - 1, max(1, round(options.held_out_share * len(texts))))
    held = set(sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())[:count])
    return [row for row in rows if row.prompt not in held], [row for row in rows if row.prompt in held]
