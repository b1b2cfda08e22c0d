"""A program of its own around `megatron.training.pretrain`: synthetic rollouts, a policy-gradient forward_step.

``python tests/support/pretrain_job.py '{"correction": "token-tis", "lr": 1e-3, "decay_period": 2}' <Megatron's flags>``
runs it patched; with ``null`` as its first argument it runs as it stands.
"""

import functools
import itertools
import json
import sys

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import get_args, training
from megatron.training.arguments import core_transformer_config_from_args

from megatron_rc import LengthDecayLR, RolloutCorrection, patch, vocab_parallel_logprobs
from megatron_rc.integrations.megatron_training import correct_micro_batch

VOCABULARY, ROWS = 64, 16


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    return GPTModel(
        config or core_transformer_config_from_args(get_args()), get_gpt_layer_local_spec(), vocab_size=VOCABULARY,
        max_sequence_length=ROWS, pre_process=pre_process, post_process=post_process, parallel_output=True,
    )  # fmt: skip


def rollouts():
    """Micro-batches that are the same in every run: tokens, how far the sampler's log-probs are off, lengths."""
    rank = parallel_state.get_data_parallel_rank()
    for number in itertools.count(get_args().iteration * 2):
        generator = torch.Generator().manual_seed(1000 * rank + number)
        tokens = torch.randint(0, VOCABULARY, (2, ROWS + 1), generator=generator)
        gap = 0.3 * torch.randn(2, ROWS, generator=generator)
        yield tokens, gap, torch.randint(3, ROWS, (2,), generator=generator)


def policy_gradient(targets, gap, mask, output):
    group = parallel_state.get_tensor_model_parallel_group()
    logprobs = vocab_parallel_logprobs(output.float(), targets, tp_group=group)
    old = logprobs.detach()
    corrected = correct_micro_batch(old, old + gap, mask)
    loss = -(logprobs * corrected.weights * corrected.mask).sum()
    count = mask.sum()
    return loss, count.int(), {"pg loss": torch.stack([loss.detach(), count.float()])}


def forward_step(data_iterator, model):
    tokens, gap, lengths = next(data_iterator)
    positions = torch.arange(ROWS)[None].expand(2, -1)
    output = model(tokens[:, :-1], positions, torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).triu(1))
    return output, functools.partial(policy_gradient, tokens[:, 1:], gap, torch.arange(ROWS) < lengths[:, None])


def datasets(sizes, vp_stage=None):
    return rollouts(), None, None


datasets.is_distributed = True


def pretrain() -> None:
    if hasattr(training, "PretrainConfigContainer"):
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        config = pretrain_cfg_container_from_args(parse_and_validate_args())
        training.pretrain(
            config, train_valid_test_dataset_provider=datasets, model_provider=model_provider,
            model_type=ModelType.encoder_or_decoder, forward_step_func=forward_step,
        )  # fmt: skip
    else:
        training.pretrain(datasets, model_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    settings = json.loads(sys.argv.pop(1))
    if settings is None:
        pretrain()
    else:
        correction = RolloutCorrection.preset(settings["correction"])
        decay = LengthDecayLR(settings["lr"], decay_period=settings["decay_period"])
        with patch("megatron-training", correction=correction, lr_rule=decay) as patched:
            pretrain()
        print(patched.report())
