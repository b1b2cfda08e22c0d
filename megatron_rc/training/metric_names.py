"""Every metric of a training job that is not about a pair of policies: name, unit, meaning.

`megatron_rc.correction.metrics` and `megatron_rc.moe.shift_metrics` have those of pairs; `megatron-rc metrics` prints
all of them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron_rc.learning_rate.rule import OF_EVERY_RULE, RULES
from megatron_rc.learning_rate.scale import PREFIX, RuleMetric


class JobMetric(NamedTuple):
    unit: str
    meaning: str


def _of_rule(metrics: Mapping[str, RuleMetric]) -> dict[str, JobMetric]:
    return {f"{PREFIX}{name}": JobMetric(metric.unit, metric.meaning) for name, metric in metrics.items()}


_ACCURACY = JobMetric("reward", "mean reward on the held-out prompts")
_GRAD_NORM = JobMetric("", "Euclidean norm of the gradient of the whole model before clipping")
_RATE = JobMetric("", "learning rate of the last optimizer step")
_MEAN = "mean over the optimizer steps"

JOB_METRICS: dict[str, dict[str, JobMetric]] = {
    "Rollout": {
        "reward/mean": JobMetric("reward", "mean reward of the responses"),
        "reward/std": JobMetric("reward", "standard deviation of the rewards"),
        "response_length/mean": JobMetric("tokens", "mean length of the responses"),
        "response_length/max": JobMetric("tokens", "longest response"),
        "response_length/truncated": JobMetric("share", "responses that ended at max_new_tokens or a limit of turns"),
        "turns/mean": JobMetric("turns", "mean turns of the responses; where some have several"),
        "groups/equal_reward": JobMetric("share", "groups whose responses all have the same reward; not trained on"),
        "horizon": JobMetric("tokens", "1 / (2 k3): the length up to which products of ratios over a response work"),
        "ess_seq_predicted": JobMetric(
            "share", "S / sum exp(2 T k3), what ess_seq would be if all gaps were small and honest; below 1/S for none"
        ),
        "persistence": JobMetric(
            "",
            "cosine of the sums of pi / mu - 1 by token id of this rollout and the one before: near 1 they differ in "
            "the same way at every sync, near 0 anew; from the second rollout on",
        ),
        "lag": JobMetric("versions", "age of the weights that sampled a token, mean over tokens"),
        "eval/accuracy": _ACCURACY,
    },
    "Update": {
        "loss": JobMetric("", f"loss of an optimizer step: its policy-gradient, KL and entropy terms; {_MEAN}"),
        "policy_loss": JobMetric("", f"policy-gradient term of the loss; {_MEAN}"),
        "kl_ref": JobMetric("nats", "KL divergence from the reference policy, as estimated in the loss; with kl_coef"),
        "entropy": JobMetric(
            "nats", "mean entropy per token before the update; without such a pass or with entropy_coef, during it"
        ),
        "clip_high": JobMetric(
            "share", "kept tokens with advantage > 0 and ratio > 1 + clip_upper; cispo: whatever their advantage"
        ),
        "clip_low": JobMetric(
            "share", "kept tokens with advantage < 0 and ratio < 1 - clip_lower; cispo: whatever their advantage"
        ),
        "dual_clip": JobMetric("share", "kept tokens with advantage < 0 and ratio > dual_clip; where it is set"),
        "grad_norm": JobMetric("", f"{_GRAD_NORM.meaning}; {_MEAN}"),
        "grad_cosine": JobMetric(
            "", f"cosine of the gradients of an optimizer step and the one before; with train.grad_cosine; {_MEAN}"
        ),
        "lr": _RATE,
        "updates": JobMetric("steps", "optimizer steps of this rollout; 0 if all groups have equal rewards"),
        "skipped_updates": JobMetric("steps", "optimizer steps that were skipped for a gradient that is not finite"),
    },
    "Score centering": {
        "centering/top_rollout_mass": JobMetric("share", "mass that the sampler gives its most probable ids"),
        "centering/top_train_mass": JobMetric("share", "mass that the trainer gives these ids"),
        "centering/tail_ratio": JobMetric(
            "", "alpha, the sampler's mass outside of them by the trainer's; 0 without any"
        ),
        "centering/tail_ratio_clamped": JobMetric("share", "tokens whose alpha is at a bound, 1 / 1000 or 1000"),
        "centering/drift_removed": JobMetric("", "norm of the mean score that centering removes, over these logits"),
        "centering/residual_drift": JobMetric(
            "", "the same norm of what the weights leave without centering; with old: current and top_logprobs"
        ),
    },
    "Learning-rate rules": _of_rule(OF_EVERY_RULE),
    **{rule.title: _of_rule(rule.metrics) for rule in RULES.values()},
    "Replay of routes": {
        "replay/share": JobMetric("share", "rows whose experts were replayed"),
        "replay/disagreement": JobMetric("share", "replayed decisions in which the router would take other experts"),
    },
    "SGLang servers": {
        "rollout/rejected": JobMetric("share", "responses that came back damaged and were discarded"),
        "rollout/rejected_<reason>": JobMetric("share", "the same, by reason, such as nan_logprob or length_mismatch"),
        "rollout/retractions": JobMetric("", "how often a server stopped a response and continued it later"),
    },
    "Asynchronous loop": {
        "asynchronous/trainer_idle": JobMetric(
            "share", "time between two syncs in which the trainer waited for rollouts"
        ),
        "asynchronous/engine_idle": JobMetric("share", "time between two syncs in which no rollout was being sampled"),
        "asynchronous/max_lag": JobMetric("versions", "age of the oldest weights that sampled a token"),
    },
    "Time": {
        "time/rollout_s": JobMetric("seconds", "sampling and rewards; with train.asynchronous, the wait for them"),
        "time/train_s": JobMetric("seconds", "old pass, correction and optimizer steps"),
        "time/step_s": JobMetric("seconds", "the whole step, with the sending of weights and an evaluation if due"),
        "tokens_per_second": JobMetric("tokens/s", "prompt and response tokens of the batch over time/step_s"),
    },
    "Supervised warm-up": {
        "cross_entropy": JobMetric("nats", "mean per response token of the demonstrations, before the optimizer step"),
        "grad_norm": _GRAD_NORM,
        "lr": _RATE,
        "eval/accuracy": _ACCURACY,
    },
}
"""Maps each section of docs/metrics.md to its metrics; the last one is the phase warmup, the others are rl."""
