"""A tokenizer of letters in the format of Hugging Face: `python tokenizer.py FOLDER`."""

import string
import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "?"}


def save(folder: str) -> None:
    words = [*SPECIAL.values(), *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    letters = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    letters.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    letters.save_pretrained(folder)


if __name__ == "__main__":
    save(sys.argv[1])
