"""The trainer's log-probs of the probe prompt are those of its weights, on every process."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from distributed import run_ranks

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import groups
from megatron_rc.training.heads import Answer
from megatron_rc.training.microbatches import MicroBatch
from megatron_rc.training.policy import Policy
from megatron_rc.training.probe import Probe

PROMPT = [3, 30, 4, 17, 5, 36, 0, 9]


def _probed(rank: int, model: str) -> Any:
    """Log-probs after a refresh, after a step of training, and after another refresh; and the weights then."""
    parallel = ParallelSettings(pipeline=2)
    place = groups.initialize(parallel, seed=1)
    policy = Policy(ModelSettings(hf_path=model), parallel, TrainSettings(optimizer="sgd", lr=0.5), place)
    policy.start_phase(lr=0.5, min_lr=0.5, warmup_steps=0, total_steps=10, decay_style="constant")
    probe = Probe(policy, PROMPT)
    probe.refresh()
    found = [probe.logprobs(PROMPT)]
    batch = TokenBatch.from_samples([Sample([3, 4], [5, 6], [0.0, 0.0], "length")], SamplingParams())

    def loss(answer: Answer) -> tuple[torch.Tensor, Any]:
        return -(answer.logprobs()[0] * batch.loss_mask).mean(), None

    policy.update([MicroBatch(batch)], loss)
    found.append(probe.logprobs(PROMPT))
    probe.refresh()
    found.append(probe.logprobs(PROMPT))
    return found, dict(policy.export())


def test_every_stage_of_a_pipeline_has_the_log_probs_of_the_weights_at_the_last_refresh(tmp_path: Path) -> None:
    truth = tiny_models.transformers_model(tiny_models.DENSE).float().eval()
    truth.save_pretrained(tmp_path)
    ranks = run_ranks(2, _probed, str(tmp_path))
    (before, unrefreshed, after), weights = ranks[0]
    assert [found for found, _ in ranks] == [ranks[0][0]] * 2, "the same on every process"
    assert before == unrefreshed
    assert before == pytest.approx(logprobs(truth), abs=2e-5)
    truth.load_state_dict(weights)
    assert after == pytest.approx(logprobs(truth), abs=2e-5)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3


def logprobs(model: Any) -> list[float]:
    """log p(PROMPT[t] | PROMPT[:t]) of t >= 1, nats."""
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT])).logits[0, :-1].double().log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, PROMPT[1:], strict=True)]
