"""get_logprobs of the patched megatron-lm without logits, on a real GPTModel whose ranks may split the rows."""

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks
from hosts.megatron_lm import sources
from tiny_models import KINDS

from megatron_rc import RolloutCorrection
from megatron_rc.integrations.megatron_lm import HOST, session
from megatron_rc.logprobs import inputs as head_inputs
from megatron_rc.models.config import hf_config_dict
from megatron_rc.settings.head import HeadOptions
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.training import groups
from megatron_rc.training.model.attention import packed_seq_params
from megatron_rc.training.model.build import build_model
from megatron_rc.training.model.weights import init_weights

TOKENS = 22


class Accepting(torch.nn.Module):
    """The model as the host calls it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module, self.pg_collection = model, model.pg_collection

    def forward(self, tokens: Any, positions: Any, mask: Any, *, fp32_output: bool, **options: Any) -> Any:
        ends = torch.tensor([0, TOKENS], dtype=torch.int32)
        return self.module(tokens, positions, mask, packed_seq_params=packed_seq_params(ends, TOKENS), **options)


def packed_bins(tokens: Any) -> Any:
    """The host's bins: an empty one, and one whose last tokens of three sequences were sampled."""
    mask = torch.zeros(2, TOKENS)
    for first, stop in ((3, 8), (10, 11), (17, TOKENS)):
        mask[1, first:stop] = 1
    info = SimpleNamespace(bin_seq_indices=[[], [0, 1, 2]], seq_starts=[[], [0, 8, 11]], seq_lengths=[8, 3, 11])
    packed = {"packed_trajs": tokens.expand(2, -1), "packed_loss_mask": mask}
    return SimpleNamespace(packing_info=info, bin_advantages=[torch.zeros(0), torch.zeros(3)], **packed)


def of_heads(rank: int, layout: dict[str, int]) -> dict[str, Any]:
    """By the head: log-probs and gradients of a row and of bins, one of them empty, rows of logits, and their width."""
    parallel = ParallelSettings(**layout)
    groups.initialize(parallel, 1)
    kind = "moe" if "expert" in layout else "dense"
    chunks = build_model(hf_config_dict(ModelSettings(config=KINDS[kind])), parallel)
    init_weights(chunks, 3)
    model, widths = Accepting(chunks[0]), list[int]()
    chunks[0].register_forward_hook(lambda module, args, answer: widths.append(answer.shape[-1]))
    tokens = torch.randint(0, 37, (1, TOKENS), generator=torch.Generator().manual_seed(7))
    upstream = torch.randn(1, TOKENS - 1, generator=torch.Generator().manual_seed(8))
    packing, out = packed_bins(tokens), dict[str, Any]()
    options = {"logits": HeadOptions(), "linear": HeadOptions("linear"), "chunks": HeadOptions("linear", 8, "fp32")}
    for head, chosen in options.items():
        session, answers = HOST.prepare(RolloutCorrection(), None, chosen), {}
        counted_products = mock.patch.object(head_inputs, "product_into", wraps=head_inputs.product_into)
        with sources.imported(sources.STUB) as host, counted_products as products:
            rl = host.rl_utils
            sources.replace(rl, session, "get_logprobs", "selective_log_softmax", "load_packed_data_by_index")
            for name, bin_idx in (("bin", 1), ("empty bin", 0), ("row", None)):
                given, counted = tokens, torch.ones(1, TOKENS - 1)
                if bin_idx is not None:
                    given, _, _, counted, *_ = rl.load_packed_data_by_index(bin_idx, packing, True)
                logprobs = rl.get_logprobs(model, given, torch.arange(TOKENS)[None])
                model.zero_grad()
                (logprobs * upstream * counted).sum().backward()
                gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                answers[name] = (logprobs.detach() * counted, gradients)
        # of every product (out, left, right) that makes logits, of hidden states
        rows = [len(left) for _, left, _ in (call.args for call in products.call_args_list) if left.shape[1] == 32]
        out[head] = {"answers": answers, "rows": rows, "width": widths.pop()}
    return out


@pytest.mark.host("megatron-lm", proof="stand-in", feature="log-probs without logits in memory")
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "expert": 2}], ids=str)
def test_logprobs_and_gradients_without_logits_are_those_with_logits(layout: dict[str, int]) -> None:
    for rank in run_ranks(2, of_heads, layout):
        logits, linear, chunks = rank["logits"], rank["linear"], rank["chunks"]
        assert (logits["width"], linear["width"]) == (19, 32)
        for (name, (logprobs, wanted)), head in product(logits["answers"].items(), (linear, chunks)):
            found, gradients = head["answers"][name]
            assert (logprobs.unique().numel() > 10) == (name != "empty bin")
            torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-6)
            assert gradients.keys() == wanted.keys()
            for parameter, expected in wanted.items():
                assert (gradients[parameter] - expected).norm() <= 2e-6 * expected.norm(), (name, parameter)
        # forward and backward: 11 tokens of a bin, none of an empty one, all where the host names no bin
        assert linear["rows"] == [11, 11, 0, 0, TOKENS - 1, TOKENS - 1]
        assert chunks["rows"] == [*[8, 3] * 2, 0, 0, *[8, 8, 5] * 2]


def test_bits_of_logits_are_refused_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    with sources.imported(sources.STUB):
        from megatron.training.global_vars import get_args

        linear = session.prepare(RolloutCorrection(), None, HeadOptions("linear"))
        built = session.setup_model_and_optimizer(lambda: "built", linear)
        monkeypatch.setattr(get_args(), "batch_invariant_mode", True, raising=False)
        for_logits = session.setup_model_and_optimizer(lambda: "built", session.prepare(RolloutCorrection(), None))
        with pytest.raises(ValueError, match="head must be 'logits' under --batch-invariant-mode"):
            session.setup_model_and_optimizer(lambda: "built", linear)
    assert built == for_logits == "built"
