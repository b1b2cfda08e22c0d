"""Memory and time of the centred loss against the same loss without centering, on this CPU.

    python benchmarks/speed/centering.py            # peaks at V 49,152 and 151,936, then interleaved times: 8 minutes

Forward and backward of token-tis under reinforce, 2,048 tokens in bf16 with 128 top ids (512 tokens for the times).
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/logprobs"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

from test_linear_memory import peak_bytes

from megatron_rc import (
    LossOptions,
    RolloutCorrection,
    TopIds,
    Weight,
    centered_logprobs,
    correct,
    linear_centered_logprobs,
    linear_logprobs,
    policy_loss,
    vocab_parallel_logprobs,
)  # fmt: skip

PLAIN = RolloutCorrection(Weight(upper=2.0), old="current")
CENTRED = RolloutCorrection(Weight(upper=2.0), old="current", centering="top")
K, SHAPES, TOKENS, TIMED = 128, ((49_152, 576), (151_936, 1_024)), 2_048, 512


class Case:
    def __init__(self, vocabulary: int, hidden: int, tokens: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, hidden, generator=random).bfloat16()
        self.weight = (torch.randn(vocabulary, hidden, generator=random) / hidden**0.5).bfloat16()
        self.targets = torch.randint(0, vocabulary, (tokens,), generator=random)
        ids = torch.stack([torch.randperm(vocabulary, generator=random)[:K] for _ in range(tokens)])
        self.top = TopIds(ids.int(), -5 - 3 * torch.rand(tokens, K, generator=random))

    def step(self, correction: RolloutCorrection, linear: bool) -> None:
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        inputs = (hidden, weight) if linear else (hidden @ weight.T,)
        term, options = None, {} if linear else {"inplace_backward": True}
        if correction.centering == "none":
            logprobs = (linear_logprobs if linear else vocab_parallel_logprobs)(*inputs, self.targets, **options)
        else:
            call = linear_centered_logprobs if linear else centered_logprobs
            logprobs, _, centering = call(*inputs, self.targets, self.top, correction, **options)
            term = centering.term
        counted, ends = torch.ones_like(logprobs, dtype=torch.bool), torch.tensor([0, len(logprobs)], dtype=torch.int32)
        mu = torch.full_like(logprobs, -8.0)
        corrected = correct(logprobs.detach(), mu, counted, correction=correction, cu_seqlens=ends)
        scale, surrogate = torch.full_like(logprobs, 1 / len(logprobs)), LossOptions(surrogate="reinforce")
        given = (logprobs, None, torch.ones_like(logprobs), corrected)
        policy_loss(*given, scale=scale, centering=term, options=surrogate).loss.backward()


def seconds(case: Case, correction: RolloutCorrection, linear: bool) -> float:
    started = time.perf_counter()
    case.step(correction, linear)
    return time.perf_counter() - started


def main() -> None:
    timed = Case(*SHAPES[0], TIMED)
    for linear in (False, True):
        pairs = [[seconds(timed, c, linear) for c in (PLAIN, CENTRED)] for _ in range(9)][1:]
        ratio = statistics.median(centred / plain for plain, centred in pairs)
        print(f"{'head' if linear else 'logits'}, V {SHAPES[0][0]:,}: {ratio:.2f} of the time", flush=True)
    for shape in SHAPES:
        case = Case(*shape, TOKENS)
        for linear in (False, True):
            plain, centred = (peak_bytes(partial(case.step, c, linear)) for c in (PLAIN, CENTRED))
            print(f"{'head' if linear else 'logits'}, V {shape[0]:,}: {centred / plain:.4f} of the peak", flush=True)


if __name__ == "__main__":
    main()
