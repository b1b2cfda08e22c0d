"""The trainer's log-probs for the probes: its checkpoint, computed by transformers on the CPU."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rc.doctor.server.scores import Logprobs
from megatron_rc.models.config import hf_config_dict, torch_dtype
from megatron_rc.models.families import family_of
from megatron_rc.models.files import HfCheckpoint
from megatron_rc.settings.model import Dtype, ModelSettings


class TrainerModel:
    """A checkpoint in the memory of the CPU, so that the server has the GPU for itself."""

    def __init__(self, hf_path: str, dtype: Dtype) -> None:
        """
        Raises:
            ValueError: the model is of an unknown family, or the files do not hold all of its tensors.
        """
        self.config = hf_config_dict(ModelSettings(hf_path=hf_path))
        """Fields of the model's config.json, defaults filled in."""
        self.vocab_size, self._path = int(self.config["vocab_size"]), Path(hf_path)
        loader: Any = family_of(self.config["model_type"]).model_class()
        options = {"dtype": torch_dtype(dtype), "attn_implementation": "sdpa", "local_files_only": True}
        try:
            model, loading = loader.from_pretrained(hf_path, output_loading_info=True, **options)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{hf_path} is not a readable checkpoint: {' '.join(str(error).split())[:200]}") from None
        # transformers would fill missing tensors with random numbers
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(f"{hf_path} lacks {len(missing)} tensors of its model, such as {missing[0]}")
        self._model = model.eval().requires_grad_(False)

    def rescore(
        self, sequences: Sequence[Sequence[int]], start: int, temperatures: Sequence[float], micro_batch: int
    ) -> list[Logprobs]:
        """Log-probs, fp32, of the tokens from position ``start`` on, sequence after sequence, at each temperature.

        All ``sequences`` have one length; a forward pass takes ``micro_batch`` of them.
        """
        cuts = range(0, len(sequences), micro_batch)
        rows = [self._logprobs(sequences[i : i + micro_batch], start, temperatures) for i in cuts]
        return list(np.concatenate(rows, axis=1))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the checkpoint by their names in it, one at a time."""
        with HfCheckpoint(self._path) as checkpoint:
            yield from checkpoint.tensors()

    def _logprobs(self, sequences: Sequence[Sequence[int]], start: int, temperatures: Sequence[float]) -> Logprobs:
        """Log-probs [temperatures, tokens] of the tokens from ``start`` on, fp64, nats."""
        ids = torch.tensor([list(sequence) for sequence in sequences])
        with torch.inference_mode():
            logits = self._model(ids, use_cache=False).logits[:, start - 1 : -1].float()
            drawn = ids[:, start:, None]
            values = [(logits / t).log_softmax(-1).gather(2, drawn).flatten() for t in temperatures]
        return torch.stack(values).double().numpy()
