"""Prompts of eight kinds about twelve topics, and a reward that updates nothing: the jobs of gap.yaml.

    python benchmarks/real/prompts.py runs/real/prompts.jsonl

Every group has equal rewards, so that a job samples, scores and dumps, and its weights stay those of the checkpoint.
"""

import json
import sys
from pathlib import Path

from megatron_rc.files import replace_text

TOPICS = {
    "the sea": "blue waves and salt", "bread": "flour, water and yeast", "a river": "the Nile and the Rhine",
    "winter": "snow and ice", "a library": "shelves of old books", "the moon": "phases and tides",
    "a garden": "roses and tomatoes", "trains": "rails and steam", "a small shop": "prices and change",
    "music": "a violin and a drum", "a school": "teachers and homework", "gravity": "falling apples",
}  # fmt: skip
KINDS = {
    "explain": "Explain {topic} to a child in a few sentences.",
    "story": "Write a short story about {topic}.",
    "list": "List five facts about {topic}, one per line.",
    "code": "Write a Python function that has to do with {topic}, such as {detail}.",
    "sum": "A box has {first} things about {topic}, another one {second}. How many are there? Show each step.",
    "translate": "Translate into French: I like {topic}, {detail}.",
    "json": 'Answer with JSON of the fields "name", "size" and "colour" for {topic}.',
    "argue": "Give one argument for and one against spending a day with {topic}.",
}


def rows() -> list[dict[str, str]]:
    """{"prompt", "answer", "kind"} of every topic and kind, topic by topic."""
    found = []
    for number, (topic, detail) in enumerate(TOPICS.items()):
        numbers = {"first": str(7 + 3 * number), "second": str(58 - 4 * number)}
        for kind, text in KINDS.items():
            found.append({"prompt": text.format(topic=topic, detail=detail, **numbers), "answer": "", "kind": kind})
    return found


def nothing(prompt: str, response: str, answer: str) -> float:
    """The reward: 0 for every response."""
    return 0.0


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(json.dumps(row) + "\n" for row in rows()))
