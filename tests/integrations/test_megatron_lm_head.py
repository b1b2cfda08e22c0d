"""get_logprobs of the patched megatron-lm without logits, on a real GPTModel whose ranks may split the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from hosts.megatron_lm import sources
from tiny_models import KINDS

TOKENS = 22
LAYOUTS: list[dict[str, int]] = [{"tensor": 2}, {"tensor": 2, "expert": 2}]


class Accepting(torch.nn.Module):
    """The model as the host calls it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module, self.pg_collection = model, model.pg_collection

    def forward(self, tokens: Any, positions: Any, mask: Any, *, fp32_output: bool, **options: Any) -> Any:
        from megatron_rc.training.model.attention import packed_seq_params

        ends = torch.tensor([0, TOKENS], dtype=torch.int32)
        return self.module(tokens, positions, mask, packed_seq_params=packed_seq_params(ends, TOKENS), **options)


def of_heads(rank: int, layout: dict[str, int]) -> dict[str, Any]:
    """By the head: log-probs, their gradients, and the last dimension of what the model answered."""
    from megatron_rc import RolloutCorrection
    from megatron_rc.integrations.megatron_lm import HOST
    from megatron_rc.models.config import hf_config_dict
    from megatron_rc.settings import ModelSettings, ParallelSettings
    from megatron_rc.training import groups
    from megatron_rc.training.model.build import build_model
    from megatron_rc.training.model.weights import init_weights

    parallel = ParallelSettings(**layout)
    groups.initialize(parallel, 1)
    kind = "moe" if "expert" in layout else "dense"
    chunks = build_model(hf_config_dict(ModelSettings(config=KINDS[kind])), parallel)
    init_weights(chunks, 3)
    model, widths = Accepting(chunks[0]), list[int]()
    chunks[0].register_forward_hook(lambda module, args, answer: widths.append(answer.shape[-1]))
    tokens = torch.randint(0, 37, (1, TOKENS), generator=torch.Generator().manual_seed(7))
    upstream = torch.randn(1, TOKENS - 1, generator=torch.Generator().manual_seed(8))
    made = {symbol.name: symbol.make for symbol in HOST.symbols}
    out: dict[str, Any] = {}
    for head in HOST.heads:
        session = HOST.prepare(RolloutCorrection(), None, head)
        with sources.imported(sources.STUB) as host:
            rl = host.rl_utils
            for name in ("get_logprobs", "selective_log_softmax"):
                setattr(rl, name, made[name](getattr(rl, name), session))
            logprobs = rl.get_logprobs(model, tokens, torch.arange(TOKENS)[None])
        model.zero_grad()
        (logprobs * upstream).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        out[head] = {"logprobs": logprobs.detach(), "gradients": gradients, "width": widths.pop()}
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logprobs_and_gradients_without_logits_are_those_with_logits(layout: dict[str, int]) -> None:
    for rank in run_ranks(2, of_heads, layout):
        logits, linear = rank["logits"], rank["linear"]
        assert (logits["width"], linear["width"]) == (19, 32)
        assert logits["logprobs"].unique().numel() > 10
        torch.testing.assert_close(linear["logprobs"], logits["logprobs"], rtol=0, atol=1e-6)
        assert linear["gradients"].keys() == logits["gradients"].keys()
        for name, expected in logits["gradients"].items():
            assert (linear["gradients"][name] - expected).norm() <= 2e-6 * expected.norm(), name


def test_bits_of_logits_are_refused_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rc import RolloutCorrection
    from megatron_rc.integrations.megatron_lm import session

    with sources.imported(sources.STUB):
        from megatron.training.global_vars import get_args

        built = session.setup_model_and_optimizer(lambda: "built", session.prepare(RolloutCorrection(), None, "linear"))
        monkeypatch.setattr(get_args(), "batch_invariant_mode", True, raising=False)
        for_logits = session.setup_model_and_optimizer(lambda: "built", session.prepare(RolloutCorrection(), None))
        with pytest.raises(ValueError, match="head must be 'logits' under --batch-invariant-mode"):
            session.setup_model_and_optimizer(lambda: "built", session.prepare(RolloutCorrection(), None, "linear"))
    assert built == for_logits == "built"
