"""An engine that answers with the recorded responses of a dump instead of sampling."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from torch import Tensor

from megatron_rc.dump.schema import dump_files, has_tokens, read_dump
from megatron_rc.dump.writer import sample_of
from megatron_rc.engine import OnFinished, Prompts, RolloutEngine, Sample, SamplingParams, check_request
from megatron_rc.rollout.opening import Opening


class RecordedEngine(RolloutEngine):
    """RolloutEngine over a dump: it finds a response by its seed, and checks that the prompt is the recorded one.

    A process may ask for any share of a step, in any order, and a resumed run needs no state. For training rollouts
    only: held-out prompts are not in a dump.
    """

    def __init__(self, path: str | Path) -> None:
        """Index the seeds of every file of the dump at ``path``.

        Raises:
            ValueError: ``path`` holds no dump, a dump has a wrong schema or no token ids, or a seed names two
                responses.
        """
        self.weight_version = -1
        self._file_of_seed: dict[int, Path] = {}
        for file in dump_files(path):
            if not has_tokens(file):
                remedy = "record a dump with --dump, or with dump.tokens=true"
                raise ValueError(f"{file} has no token ids, so its responses cannot be replayed: {remedy}")
            for seed in pq.read_table(file, columns=["seed"])["seed"].to_pylist():
                if seed in self._file_of_seed:
                    raise ValueError(f"{file}: seed {seed} is also recorded in {self._file_of_seed[seed]}")
                self._file_of_seed[seed] = file
        self._path = path
        self._loaded: Path | None = None
        self._records: dict[int, dict[str, Any]] = {}

    def generate(
        self, prompts: Prompts, params: SamplingParams, *, n: int, seeds: Sequence[int], on_finished: OnFinished = None
    ) -> list[Sample]:
        """The recorded responses of ``seeds``.

        Raises:
            ValueError: what ``check_request`` refuses, a seed that was not recorded, or a prompt (named by step, prompt
                and token) or sampling settings that differ from the recorded ones.
        """
        check_request(prompts, params, n=n, seeds=seeds)
        samples = []
        for response, seed in enumerate(seeds):
            record = self._record(seed, response // n)
            _check_prompt(record, prompts[response // n], response // n)
            _check_sampling(record, params)
            samples.append(sample_of(record))
        if on_finished is not None:
            on_finished(len(samples))
        return samples

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Remember the version, and nothing else."""
        # the export is a collective: other ranks would wait for ever if it were not read
        for _ in weights:
            pass
        self.weight_version = version

    def close(self) -> None:
        self._records.clear()

    def _record(self, seed: int, prompt: int) -> dict[str, Any]:
        file = self._file_of_seed.get(seed)
        if file is None:
            raise ValueError(f"{self._path} holds no response with seed {seed} (prompt {prompt} of this call)")
        if file != self._loaded:
            self._records = {record["seed"]: record for step in read_dump(file) for record in step}
            self._loaded = file
        return self._records[seed]


def open_engine(opening: Opening) -> RecordedEngine:
    path = opening.settings.recorded_path
    assert path is not None, "the settings refuse this"
    return RecordedEngine(path)


def _check_prompt(record: dict[str, Any], prompt: Sequence[int], index: int) -> None:
    asked, recorded = list(prompt), record["prompt_ids"]
    if asked == recorded:
        return
    pairs = zip(asked, recorded, strict=False)
    token = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(asked), len(recorded)))
    differs = f"prompt {index} of this call differs from the recorded prompt of seed {record['seed']}"
    where = f"from token {token} on ({len(asked)} tokens, recorded {len(recorded)})"
    raise ValueError(f"step {record['step']}: {differs} {where}")


def _check_sampling(record: dict[str, Any], params: SamplingParams) -> None:
    for name in ("temperature", "top_p", "top_k"):
        asked, recorded = getattr(params, name), record[name]
        if asked != recorded:
            raise ValueError(f"step {record['step']}: {name} is {asked!r}, but the dump was sampled with {recorded!r}")
    found = len(record["top_ids"][0]) if record["top_ids"] else 0
    if params.top_logprobs not in (0, found):
        must = f"top_logprobs must be 0 or {found}, as the dump has them"
        raise ValueError(f"step {record['step']}: {must}, got {params.top_logprobs!r}")
