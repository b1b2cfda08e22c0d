"""What a served model says, by transformers in fp32."""

import tiny_models
import torch
from sglang_server import MODELS

from megatron_rc.engine import Sample

CLOSE = 2e-5


class Truth:
    """The served model in fp32 by transformers."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.model = tiny_models.transformers_model(MODELS[kind], seed).float().eval()

    def logits(self, sample: Sample) -> torch.Tensor:
        """[outputs, V] fp64, of the rows that drew the output."""
        ids = sample.prompt_ids + sample.output_ids
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0, len(sample.prompt_ids) - 1 : -1].double()

    def logprobs(self, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
        """[outputs] of the output, over the kept ids where there are some."""
        scaled = self.logits(sample) / temperature
        for row, kept in zip(scaled, sample.support or [], strict=False):
            dropped = torch.ones_like(row, dtype=torch.bool)
            dropped[kept] = False
            row[dropped] = -torch.inf
        return scaled.log_softmax(-1).gather(-1, torch.tensor(sample.output_ids)[:, None])[:, 0]

    def routes(self, sample: Sample) -> torch.Tensor:
        """[tokens - 1, layers, k], the experts in descending order of their router's score."""
        ids = sample.prompt_ids + sample.output_ids
        with torch.no_grad():
            scores = self.model(torch.tensor([ids]), output_router_logits=True).router_logits
        k = self.model.config.num_experts_per_tok
        return torch.stack([layer.topk(k).indices[:-1] for layer in scores], 1).to(torch.int32)
