"""The fused head beside the path that keeps logits: CPU seconds and memory of the policy loss and its gradients.

    python benchmarks/linear_head.py
    python benchmarks/linear_head.py --masked 0.5 --tokens 2048

Hidden states and the weight of the head are given, as after the last layer of a model. Every path computes log-probs,
entropy, the policy loss with PPO clipping, and the gradients of both; all in fp32 on CPU, one path after another, so
that a machine that slows down slows all of them. Seconds are CPU time of all threads, the median of the repetitions.
Memory is the most that was allocated at a time beyond the inputs, the gradients of both among it. The first path writes
the gradient of the logits over them; the head leaves out the masked rows, which the logits path cannot.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import checkout  # noqa: F401 - first, for the helpers of the tests
import torch
from peak_memory import peak_bytes
from torch import Tensor

from megatron_rc import (
    RolloutCorrection,
    correct,
    linear_logprobs,
    linear_policy_loss,
    loss_scale,
    policy_loss,
    vocab_parallel_logprobs,
)


class Problem:
    """Hidden states, a weight, and a corrected rollout."""

    def __init__(self, tokens: int, width: int, vocabulary: int, masked: float, chunk: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, width, generator=random).requires_grad_()
        self.weight = (torch.randn(vocabulary, width, generator=random) / width**0.5).requires_grad_()
        self.targets = torch.randint(0, vocabulary, (tokens,), generator=random)
        self.mask = torch.arange(tokens) >= masked * tokens
        self.rows = self.mask.nonzero()[:, 0]
        self.chunk = chunk
        self.old = torch.full((tokens,), -9.0)
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        correction = RolloutCorrection.preset("token-tis")
        self.corrected = correct(self.old, self.old - 0.01, self.mask, correction=correction, cu_seqlens=ends)
        self.scale = loss_scale(self.mask, self.corrected.mask, cu_seqlens=ends)
        self.advantages = torch.randn(tokens, generator=random)

    def logits(self) -> Tensor:
        options: dict[str, Any] = {"mask": self.mask, "with_entropy": True, "inplace_backward": True}
        return self._loss(vocab_parallel_logprobs(self.hidden @ self.weight.T, self.targets, **options))

    def logprobs(self) -> Tensor:
        options: dict[str, Any] = {"mask": self.mask, "with_entropy": True, "rows": self.rows, "chunk": self.chunk}
        return self._loss(linear_logprobs(self.hidden, self.weight, self.targets, **options))

    def fused(self) -> Tensor:
        given = self.old, self.advantages, self.corrected
        options: dict[str, Any] = {"mask": self.mask, "with_entropy": True, "rows": self.rows, "chunk": self.chunk}
        head = self.hidden, self.weight, self.targets
        return linear_policy_loss(*head, *given, scale=self.scale, entropy_coef=0.01, **options).loss

    def _loss(self, result: Any) -> Tensor:
        given = self.old, self.advantages, self.corrected
        return policy_loss(result[0], *given, scale=self.scale, entropy=result[1], entropy_coef=0.01).loss


def once(problem: Problem, loss: Callable[[], Tensor]) -> None:
    problem.hidden.grad = problem.weight.grad = None
    loss().backward()


def cpu_seconds(call: Callable[[], None]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--masked", type=float, default=0.0, help="share of the tokens without a loss")
    parser.add_argument("--repeat", type=int, default=7)
    asked = parser.parse_args()
    problem = Problem(asked.tokens, asked.width, asked.vocabulary, asked.masked, asked.chunk)
    paths = {"logits": problem.logits, "linear_logprobs": problem.logprobs, "linear_policy_loss": problem.fused}
    calls = {name: partial(once, problem, loss) for name, loss in paths.items()}
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(asked.repeat):
        for name, call in calls.items():
            seconds[name].append(cpu_seconds(call))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("| path | CPU seconds | over logits | peak MB |\n| --- | --- | --- | --- |")
    for name, median in medians.items():
        print(f"| {name} | {median:.3f} | {median / medians['logits']:.2f} | {peaks[name] / 1e6:.0f} |")


if __name__ == "__main__":
    main()
