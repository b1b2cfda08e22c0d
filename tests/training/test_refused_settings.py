"""Settings of a job that cannot act together, or at all, are refused by name when the job starts."""

import pytest

from megatron_rc.settings import job as settings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training.kept_steps import check_dump
from megatron_rc.training.rollout_queue import check_asynchronous
from megatron_rc.training.sampling_weights import check_sampling_weights
from megatron_rc.training.step.reinforce import check_modes


def check(text: str, dump: bool = True) -> None:
    job = settings.load(text)
    check_asynchronous(job)
    check_sampling_weights(job)
    check_modes(job.correction, job.loss, job.train)
    check_dump(job, every_step=dump)


REFUSED = [
    ("{train: {asynchronous: 1}, rollout: {engine: recorded, recorded_path: dump}}",
     "^train.asynchronous must be 0 when rollout.engine is 'recorded': "),
    ("{train: {asynchronous: 1}, rollout: {lag: 2}}",
     "^rollout.lag must be 0 with train.asynchronous, got 2: "),
    ("{train: {keep_sampling_weights: true}, correction: {old: current}}",
     "^correction.old must be 'recompute' with train.keep_sampling_weights, got"),
    ("{train: {keep_sampling_weights: true}, rollout: {engine: recorded, recorded_path: dump}}",
     "^train.keep_sampling_weights must be false when rollout.engine is 'recorded': "),
    ("{correction: {weight: {upper: 1.5, staleness_upper: 1.3}, old: current}}",
     "staleness_upper must be null when old is 'current'"),
    ("{correction: {weight: {upper: 1.5, staleness_upper: 1.3}, old: rollout}, loss: {surrogate: reinforce}}",
     "staleness_upper must be null when old is 'rollout'"),
    ("{correction: token-tis, train: {control: random-mask}}", "'random-mask' for a correction that drops nothing"),
    ("{correction: none, train: {control: mean-weight}}", "'mean-weight' for a correction without weight and"),
    ("{correction: {preset: seq-mis, old: rollout}, loss: {surrogate: reinforce}, train: {control: random-mask}}",
     "train.control must be 'none' when correction.old is 'rollout'"),
    ("{correction: {old: current}, train: {mini_batches_per_rollout: 2}}",
     "train.mini_batches_per_rollout must be 1 when correction.old is 'current'"),
    ("{correction: {preset: standardized, old: current}}",
     "reject must not use 'standardized' in a job whose correction.old is 'current'"),
    ("dump: {keep: 0, tokens: true}", "tokens must be false when keep is 0"),
    ("dump: {keep: -1}", "keep must be >= 0"),
    ("dump: {max_bytes: 1000}", "max_bytes must be >= 1048576"),
    ("dump: {kept_mass: true}", "dump.kept_mass needs rollout.top_p below 1"),
    ("{correction: {preset: token-tis, old: current}, dump: {varentropy: true}}",
     "dump.varentropy needs correction.old='recompute'"),
    ("train: {head_chunk: 256}", "head_chunk must be null with head 'logits', which makes all logits, got 256"),
    ("train: {head_logits_dtype: fp32}", "head_logits_dtype must be null with head 'logits'"),
    ("train: {head: linear, head_logits_dtype: bf16}", "train.head_logits_dtype: Input should be 'fp32', got 'bf16'"),
    ("train: {head: linear, head_chunk: 0}", "head_chunk must be >= 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_what_cannot_act_is_refused_by_name(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check(text)


def test_the_same_settings_are_taken_where_they_act() -> None:
    for alone in ("engine: recorded, recorded_path: dump", "lag: 2"):
        check(f"rollout: {{{alone}}}")
    check("correction: {old: current}")
    check("dump: {keep: 0, varentropy: true}")
    with pytest.raises(ValueError, match="dump.varentropy must be false when dump.keep is 0"):
        check("dump: {keep: 0, varentropy: true}", dump=False)


def test_a_dtype_of_the_head_is_refused_also_where_python_makes_the_settings() -> None:
    with pytest.raises(ValueError, match="head_logits_dtype must be 'fp32' or null, got 'bf16'"):
        TrainSettings(head="linear", head_logits_dtype="bf16")  # type: ignore[arg-type]
