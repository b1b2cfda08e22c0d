"""The trainer's log-probs of a fixed prompt: servers that hold its weights must compute the same ones."""

from collections.abc import Sequence

import torch

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.training.microbatches import MicroBatch
from megatron_rc.training.policy import Policy


class Probe:
    """All processes compute it together before the weights are sent; the sending process compares it afterwards."""

    def __init__(self, policy: Policy, prompt: Sequence[int]) -> None:
        self._policy, self._prompt = policy, list(prompt)
        self._logprobs: list[float] = []

    def logprobs(self, prompt: list[int]) -> list[float]:
        """log pi(prompt[t] | prompt[:t]) for t >= 1, nats, at temperature 1, by the weights of the last ``refresh``."""
        assert prompt == self._prompt
        return self._logprobs

    def refresh(self) -> None:
        """Compute them with the present weights; a collective of all processes."""
        policy, prompt = self._policy, self._prompt
        answer = Sample(prompt[:1], prompt[1:], [0.0] * (len(prompt) - 1), "length")
        batch = TokenBatch.from_samples([answer], SamplingParams(max_new_tokens=len(prompt))).to(policy.device)
        logprobs, _ = policy.logprobs([MicroBatch(batch)])
        if not policy.groups.last_stage:
            logprobs = torch.zeros(batch.num_tokens, device=policy.device)
        self._logprobs = policy.groups.from_last_stage(logprobs)[:-1].tolist()
