"""The trainer's log-probs of a fixed prompt, by which weights that arrived elsewhere are proved equal to its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.training.policy import Policy, split_rows


class Probe:
    """Every process computes it together before an update; the process that sends the weights compares it after."""

    def __init__(self, policy: Policy, prompt: Sequence[int]) -> None:
        self._policy, self._prompt = policy, list(prompt)
        self._logprobs: list[float] = []

    def logprobs(self, prompt: list[int]) -> list[float]:
        """log pi(prompt[t] | prompt[:t]) of t >= 1, nats, at temperature 1, by the weights of the last ``refresh``."""
        assert prompt == self._prompt
        return self._logprobs

    def refresh(self) -> None:
        """Compute them by the present weights; a collective of all processes."""
        policy, prompt = self._policy, self._prompt
        answer = Sample(prompt[:1], prompt[1:], [0.0] * (len(prompt) - 1), "length")
        batch = TokenBatch.from_samples([answer], SamplingParams(max_new_tokens=len(prompt))).to(policy.device)
        logprobs, _ = policy.logprobs(split_rows(batch, [[0]]))
        if not policy.groups.last_stage:
            logprobs = torch.zeros(batch.num_tokens, device=policy.device)
        self._logprobs = policy.groups.from_last_stage(logprobs)[:-1].tolist()
