"""One line puts rollout correction and the length decay into a loop that exists, and takes them out again.

    python examples/patch_existing_loop.py

The loop is examples/existing_loop.py, a GPTModel of Megatron-Core with a GRPO loss of its own, and it stays as it is.
What `patch` replaces in a codebase that it does not know is said once, in a Host. The loop samples with weights that
are 16 updates old: the same 80 steps end at less than half of the reward without the patch. Half a minute on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import existing_loop  # isort: skip - it starts the emulation of CUDA
from torch import Tensor

from megatron_rc import LengthDecayLR, MetricSums, RolloutCorrection, correct, patch
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.symbols import Host, Symbol


@dataclass
class Session:
    """What one patch of the loop knows."""

    correction: RolloutCorrection
    lr_rule: LengthDecayLR | None
    seen: MetricSums = field(default_factory=MetricSums)
    schedulers: list[Any] = field(default_factory=list)

    def decays(self) -> bool:
        return self.lr_rule is not None

    def release(self) -> None:
        """Called when the patch is undone: the learning rate is the scheduler's own again."""
        for scheduler in self.schedulers:
            assert self.lr_rule is not None
            self.lr_rule.detach(scheduler)
        m = self.seen.values()
        weights = f"ESS {m['ess_token_final']:.4f} with weights up to {m['weight_max']:.3f}"
        print(f"all steps: k3 {m['k3']:.5f}, ESS of pi/mu {m['ess_token']:.4f}; the loss had {weights}")


def make_loss(original: Callable[..., Tensor], session: Session) -> Callable[..., Tensor]:
    def grpo_loss(current: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        corrected = correct(old, rollout, mask, correction=session.correction, advantages=advantages)
        corrected.metrics.check()
        session.seen.merge(corrected.metrics)
        if session.lr_rule is not None:  # the loop takes one optimizer step per rollout
            session.lr_rule.step(corrected.metrics.values()["response_length"])
        # 0 where a token is rejected; the loop's denominator still counts it
        return original(current, old, rollout, advantages * corrected.weights, mask)

    return grpo_loss


def make_scheduler(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def attached(optimizer: Any) -> Any:
        assert session.lr_rule is not None
        scheduler = original(optimizer)
        session.lr_rule.attach(scheduler)
        session.schedulers.append(scheduler)
        return scheduler

    return attached


LOSS = "current_logprobs, old_logprobs, rollout_logprobs, advantages, mask"
HOSTS["existing-loop"] = Host(
    name="existing-loop",
    module="existing_loop",
    symbols=(
        Symbol("existing_loop", "grpo_loss", LOSS, make_loss, "weights the advantages, and steps the length decay"),
        Symbol(
            "existing_loop", "make_scheduler", "optimizer", make_scheduler, "attaches the length decay", Session.decays
        ),
    ),
    versions=(),
    read_version=lambda: None,
    prepare=lambda correction, lr_rule: Session(correction or RolloutCorrection(), lr_rule),
    release=Session.release,
    differences=("the run stops when more than 1 % of a step's log-probs are NaN, infinite or above 0",),
)


def main() -> None:
    existing_loop.start()
    print("before: rollouts 16 updates old, only measured")
    with patch("existing-loop", correction="none"):
        existing_loop.train()
    print("after: corrected, with the length decay")
    decay = LengthDecayLR(existing_loop.LR, decay_period=60)
    with patch("existing-loop", correction="token-tis", lr_rule=decay) as patched:
        existing_loop.train()
    print(patched.report())


if __name__ == "__main__":
    main()
