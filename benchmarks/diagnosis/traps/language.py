"""A synthetic language whose statistics resemble those of text: certain inside words, uncertain between them."""

from collections.abc import Iterator

import numpy as np

VOCABULARY = 4096
END = 1
"""Id that ends a document."""
TOPICS = 16
TOPIC_IDS = 2
"""First of the ids that name a topic; a document starts with one."""
_WORDS, _CLASSES, _PIECES = 3000, 24, 256
"""A class of words is followed by one of four others; class 0 closes a sentence."""
_CLOSING_ENDS = 0.03
"""Chance that a document ends where a sentence does."""


class Language:
    """Words of one to four ids in classes that follow each other, half of them bound to a topic, all by Zipf's law."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        first = random.permutation(np.arange(TOPIC_IDS + TOPICS + _PIECES, VOCABULARY))[:_WORDS]
        pieces = random.integers(TOPIC_IDS + TOPICS, TOPIC_IDS + TOPICS + _PIECES, (_WORDS, 3))
        lengths = random.choice(4, _WORDS, p=[0.35, 0.3, 0.2, 0.15])
        self._words = [[int(a), *map(int, rest[:n])] for a, rest, n in zip(first, pieces, lengths, strict=True)]
        classes, topics = random.integers(0, _CLASSES, _WORDS), random.integers(0, 2 * TOPICS, _WORDS)
        self._lists = [[np.flatnonzero((classes == c) & (topics == t)) for t in range(TOPICS)] for c in range(_CLASSES)]
        self._common = [np.flatnonzero((classes == c) & (topics >= TOPICS)) for c in range(_CLASSES)]
        self._next = np.stack([random.choice(_CLASSES, 4, replace=False) for _ in range(_CLASSES)])

    def documents(self, seed: int, topics: range = range(TOPICS)) -> Iterator[list[int]]:
        """Yield documents of these topics without end."""
        random = np.random.default_rng(seed)
        while True:
            topic = int(random.integers(topics.start, topics.stop))
            yield [TOPIC_IDS + topic, *self._text(random, topic)]

    def _text(self, random: np.random.Generator, topic: int) -> Iterator[int]:
        kind = int(random.integers(_CLASSES))
        while True:
            bound = self._lists[kind][topic]
            words = bound if bound.size and random.random() < 0.6 else self._common[kind]
            # rank r has weight r^-1.4
            weights = np.arange(1, words.size + 1) ** -1.4
            yield from self._words[words[np.searchsorted(np.cumsum(weights), random.random() * weights.sum())]]
            if kind == 0 and random.random() < _CLOSING_ENDS:
                yield END
                return
            kind = int(self._next[kind, min(3, int(random.geometric(0.5)) - 1)])

    def batch(self, seed: int, rows: int, length: int, topics: range = range(TOPICS)) -> np.ndarray:
        """[rows, length] ids of documents, one after the other."""
        ids: list[int] = []
        for document in self.documents(seed, topics):
            ids += document
            if len(ids) >= rows * length:
                return np.asarray(ids[: rows * length]).reshape(rows, length)
        raise AssertionError("documents never end")

    def prompts(self, seed: int, count: int, length: int) -> list[list[int]]:
        """The first ``length`` ids of ``count`` documents."""
        documents = (document for document in self.documents(seed) if len(document) >= length)
        return [document[:length] for document, _ in zip(documents, range(count), strict=False)]
