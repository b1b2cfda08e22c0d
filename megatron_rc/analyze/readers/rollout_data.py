"""What slime and miles know about a sample before training and do not repeat in their train data.

``--save-debug-rollout-data`` and ``--dump-details`` (its folder rollout_data) write one torch file per rollout with the
fields of every Sample.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile
from megatron_rc.analyze.readers.torch_file import TorchFile, first_values, value_of

NAMES = frozenset({"rollout_id", "samples"})
"""Names at the start of such a file; the train data of slime has them, too, and a format version."""


def _head(file: Path) -> list[str | int]:
    """The values at the start of a file; none for a damaged one."""
    try:
        return first_values(file)
    except UnreadableFile:
        return []


def is_rollout_data(file: Path) -> bool:
    """True for a file of samples before training."""
    values = {value for value in _head(file) if isinstance(value, str)}
    return values >= NAMES and "format_version" not in values and "rollout_data" not in values


def rollout_of(file: Path) -> int | None:
    """The rollout that the head of a file names; None for a damaged one."""
    following = (after for name, after in pairwise(_head(file)) if name == "rollout_id")
    return next((value for value in following if isinstance(value, int)), None)


def groups(files: list[Path], key: Callable[[Path], Any]) -> list[Group]:
    """Files of train data with the same ``key``, followed by the file with the samples of their rollout if it is there.

    Files of evaluations are left out: their names have "eval_" before the number of the rollout.
    """
    train: dict[Any, list[Path]] = {}
    samples: dict[int | None, list[Path]] = {}
    for file in files:
        number = rollout_of(file)
        if not is_rollout_data(file):
            train.setdefault(key(file), []).append(file)
        elif f"eval_{number}" not in file.name:
            samples.setdefault(number, []).append(file)
    found: list[Group] = []
    for group in train.values():
        number = rollout_of(group[0])
        known = samples.get(number, []) if number is not None else []
        known = known or _of_dump_details(group[0], number)
        # the file whose path shares most with that of the train data
        found.append((*group, *sorted(known, key=lambda file: -_shared(file, group[0]))[:1]))
    return found


def _of_dump_details(train: Path, number: int | None) -> list[Path]:
    """The file in the folder rollout_data next to the folder train_data, if only the latter was given."""
    file = train.absolute().parent.with_name("rollout_data") / f"{number}.pt"
    return [file] if train.absolute().parent.name == "train_data" and file.is_file() and is_rollout_data(file) else []


def _shared(file: Path, other: Path) -> int:
    pairs = zip(file.parts, other.parts, strict=False)
    return next((count for count, (own, others) in enumerate(pairs) if own != others), len(file.parts))


class RolloutData:
    """The samples of one rollout; UnreadableFile unless the file holds them whole."""

    def __init__(self, file: Path) -> None:
        self.file = file
        # routes and rewards may be NumPy values, and are not needed
        saved = TorchFile(file).load(skip_numpy=True)
        samples = saved.get("samples") if type(saved) is dict else None
        if type(samples) is not list or not all(type(sample) is dict for sample in samples):
            raise UnreadableFile(f"{file} must hold the samples of a rollout, a list of dictionaries")
        self._samples: list[dict[str, Any]] = samples
        self._by_index: dict[int, int] = {}
        for place, sample in enumerate(samples):
            if type(index := sample.get("index")) is int:
                # an index that several samples share identifies none of them
                self._by_index[index] = -1 if index in self._by_index else place

    def sample(self, place: Any, index: Any) -> dict[str, Any] | None:
        """The sample at a place of the rollout; without a place, the one with the index."""
        if type(place) is not int:
            place = self._by_index.get(index, -1) if type(index) is int else -1
        return self._samples[place] if 0 <= place < len(self._samples) else None


Name = tuple[Any, Any]
"""Place of a training sample in its rollout, and its index; None where the host does not give it."""


def read(group: Group, samples: Iterable[tuple[Name, Any]], corrupt: CorruptRows) -> RolloutData | None:
    """The samples of the rollout, if the last file of a group holds them.

    ``samples``: name and token ids of each training sample. A file with other samples than the train data counts as one
    that cannot be read, and is left out.
    """
    if len(group) < 2 or not is_rollout_data(group[-1]):
        return None
    try:
        data = RolloutData(group[-1])
        for number, (name, ids) in enumerate(samples):
            own = data.sample(*name)
            if own is None or not _same(own.get("tokens"), ids):
                raise UnreadableFile(f"{data.file} is not the rollout of {group[0]}: sample {number} differs")
    except UnreadableFile as error:
        corrupt.add_file(str(error))
        return None
    return data


def _same(own: Any, ids: Any) -> bool:
    try:
        return np.array_equal(rows.whole_numbers(value_of(own), "tokens"), rows.whole_numbers(value_of(ids), "tokens"))
    except rows.BadRow:
        return False
