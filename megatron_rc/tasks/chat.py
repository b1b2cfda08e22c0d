"""Texts as token ids: the tokenizer of a checkpoint, its chat template, and what ends a response."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_rc.schema import one_line

Template = Literal["auto", "always", "never"]


class Chat:
    """The tokenizer of a folder."""

    def __init__(self, directory: str | None, template: Template = "auto") -> None:
        """Read the folder; ValueError for one that is missing or holds no tokenizer, template or stop token."""
        self._tokenizer = _load_tokenizer(directory)
        self.stop_token_ids = _stop_token_ids(self._tokenizer)
        self.vocab_size: int = len(self._tokenizer)
        of_tokenizer, name = bool(self._tokenizer.chat_template), self._tokenizer.name_or_path
        if template == "always" and not of_tokenizer:
            raise ValueError(f"chat_template is 'always', but tokenizer {name!r} has no chat template")
        self._has_template = template != "never" and of_tokenizer

    def encode(self, prompts: Sequence[str], system: str = "") -> list[list[int]]:
        """Token ids of each prompt: a user's message, after that of the system, where there is a template."""
        texts = [f"{system}\n\n{prompt}" if system else prompt for prompt in prompts]
        if self._has_template:
            first = [{"role": "system", "content": system}] if system else []
            chats = [[*first, {"role": "user", "content": prompt}] for prompt in prompts]
            template = self._tokenizer.apply_chat_template
            texts = [template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        # a template writes its special tokens itself
        return list(self._tokenizer(texts, add_special_tokens=not self._has_template)["input_ids"])

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response, with the stop token."""
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.stop_token_ids[0]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _load_tokenizer(directory: str | None) -> Any:
    if directory is None:
        raise ValueError("tokenizer must name a folder when model.hf_path does not")
    if not Path(directory).is_dir():
        raise ValueError(f"tokenizer: no such folder: {directory!r}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # a damaged file makes the library raise anything
        raise ValueError(f"tokenizer: {directory!r} holds no usable tokenizer: {one_line(error)}") from error


def _stop_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """The end of sequence of the tokenizer, and those of generation_config.json, where chat models have others."""
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    generation = Path(tokenizer.name_or_path) / "generation_config.json"
    if generation.is_file():
        value = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not ids:
        raise ValueError(f"tokenizer: {tokenizer.name_or_path!r} has no end-of-sequence token")
    return tuple(dict.fromkeys(ids))


_TOKENIZER = "tokenizer* vocab.* merges.txt *.model *.tiktoken special_tokens_map.json added_tokens.json"


def copy_tokenizer(source: str | Path, target: Path) -> None:
    """Copy the tokenizer, the chat template and what ends a response, as far as ``source`` has them."""
    for pattern in (*_TOKENIZER.split(), "chat_template*", "generation_config.json"):
        for path in Path(source).glob(pattern) if Path(source).resolve() != target.resolve() else ():
            if path.is_file():
                shutil.copyfile(path, target / path.name)
