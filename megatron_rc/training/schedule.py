"""The optimizer and learning-rate schedule with which a phase of a job starts."""

from __future__ import annotations

from megatron_rc.lr_decay import LengthDecayLR
from megatron_rc.settings import JobSettings
from megatron_rc.training.checkpoint import Progress
from megatron_rc.training.policy import Policy


def start_phase(policy: Policy, settings: JobSettings, progress: Progress) -> LengthDecayLR | None:
    """Start ``progress.phase`` of ``policy``; returns the length-decay learning rate, if the job has one."""
    warmup, train = settings.warmup, settings.train
    if progress.phase == "warmup":
        policy.start_phase(lr=warmup.lr, min_lr=0.0, warmup_steps=0, total_steps=warmup.steps, decay_style="constant")
        return None
    policy.start_phase(
        lr=train.lr,
        min_lr=train.min_lr,
        warmup_steps=train.lr_warmup_steps,
        total_steps=train.steps * train.mini_batches_per_rollout,
        decay_style=train.lr_decay_style,
    )
    if settings.lr_decay is None:
        return None
    decay = settings.lr_decay.build(train.lr)
    decay.attach(policy.scheduler)
    if progress.lr_decay is not None:
        decay.load_state_dict(progress.lr_decay)
        return decay
    for _ in range(progress.step):  # the job had no length decay so far: these rollouts count, unmeasured
        decay.step(None)
    return decay
