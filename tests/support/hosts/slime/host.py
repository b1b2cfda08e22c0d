"""What slime and miles hand to a hook: arguments and the layouts of a micro-batch on one context-parallel rank.

Written from the layouts alone, by enumerating which rank holds which position of a sequence.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rc import Corrected, RolloutCorrection, correct
from megatron_rc.integrations.slime.settings import HOOKS, path_of
from megatron_rc.integrations.slime.settings import naming as naming

PATHS = {hook: path_of(hook).rpartition(".") for hook in HOOKS}
hooks: Any = SimpleNamespace(**{hook: getattr(import_module(path[0]), hook) for hook, path in PATHS.items()})
"""The hooks of megatron_rc, as the hosts load them."""
VOCAB = 12
SHAPES = ((3, 5), (1, 1), (9, 2), (2, 8))
"""(prompt, response) tokens of four samples; with two ranks, one of them has no response token of the third."""
ROWS = torch.tensor([2, 3, 4, 5, 6, 8, 18, 19, 22, 23, 24, 25, 26, 27, 28, 29])
"""Rows of the packed logits of SHAPES that predict response tokens."""


def arguments(**changes: Any) -> Namespace:
    """Those that a hook of ours may read, with slime's defaults, and the key of the YAML file."""
    values: dict[str, Any] = {
        **dict.fromkeys(("use_tis", "get_mismatch_metrics", "use_rollout_logprobs", "use_opsm", "use_opd"), False),
        **dict.fromkeys(("use_kl_loss", "use_unbiased_kl", "calculate_per_token_loss", "allgather_cp"), False),
        **dict.fromkeys(("custom_tis_function_path", "custom_pg_loss_reducer_function_path"), None),
        **dict.fromkeys(("custom_loss_function_path", "custom_megatron_init_path", "save_debug_train_data"), None),
        **dict.fromkeys(("rollout_data_postprocess_path", "custom_megatron_before_train_step_hook_path"), None),
        **{"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0, "kl_loss_coef": 0.0},
        **{"kl_loss_type": "k1", "tis_clip": 2.0, "tis_clip_low": 0.0, "loss_type": "policy_loss"},
        **{"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "log_probs_chunk_size": -1},
        **{"advantage_estimator": "grpo", "context_parallel_size": 1, "recompute_loss_function": False},
        **{"rollout_batch_size": 2, "n_samples_per_prompt": 2, "global_batch_size": 4, "num_steps_per_rollout": None},
        **{"rollout_max_response_len": 16, "load": None, "save": None, "train_backend": "megatron"},
        "megatron_rc": {},
    }
    return Namespace(**{**values, **changes})


def inside(host: str, patch: Any) -> None:
    """As in a process of this host, or of none (""); ``patch`` is pytest's monkeypatch."""
    for other in ("slime", "miles"):
        patch.delitem(sys.modules, f"{other}.backends.megatron_utils.initialize", raising=False)
    if host:
        patch.setitem(sys.modules, f"{host}.backends.megatron_utils.initialize", ModuleType(host))


MILES = {
    **{"qkv_format": "thd", "true_on_policy_mode": False, "skip_actor_forward_only": False},
    **{"observe_training_entropy": True, "dump_details": None, "vocab_size": None},
}
"""Arguments that miles has besides."""


@dataclass
class Rollout:
    """Whole samples, as no rank has them; every list has one tensor per sample."""

    tokens: list[Tensor]
    prompts: list[int]
    loss_masks: list[Tensor]
    """[response] int32: a hole makes two turns of a long response."""
    logits: list[Tensor]
    """[total, VOCAB], row t predicts token t + 1."""
    values: dict[str, list[Tensor]]
    """log_probs, rollout_log_probs, ref_log_probs and advantages, [response]."""

    @property
    def totals(self) -> list[int]:
        return [len(ids) for ids in self.tokens]

    @property
    def responses(self) -> list[int]:
        return [len(mask) for mask in self.loss_masks]

    @property
    def targets(self) -> Tensor:
        return torch.cat([ids[prompt:] for ids, prompt in zip(self.tokens, self.prompts, strict=True)])

    def denominators(self) -> Tensor:
        return torch.stack([mask.sum() for mask in self.loss_masks]).float()

    def current(self, logits: Tensor) -> Tensor:
        """Log-probs of the response tokens by packed logits [1, T, VOCAB] of SHAPES."""
        return logits[0].log_softmax(-1)[ROWS].gather(1, self.targets[:, None])[:, 0]

    def corrected(self, correction: Any) -> Corrected:
        """The correction of all samples in one process."""
        names = ("log_probs", "rollout_log_probs", "advantages")
        train, sampled, advantages = (torch.cat(self.values[name]) for name in names)
        return correct(
            train, sampled, torch.cat(self.loss_masks).bool(), correction=RolloutCorrection.from_dict(correction),
            cu_seqlens=torch.tensor([0, *self.responses]).cumsum(0).int(), advantages=advantages,
        )  # fmt: skip

    def held(self, cp_rank: int, cp_size: int, padded: int | None = None) -> list[Tensor]:
        """Per sample, the response tokens whose logits a context-parallel rank holds: t is predicted at row t - 1."""
        here = []
        for prompt, total in zip(self.prompts, self.totals, strict=True):
            rows = positions(padded or total, cp_rank, cp_size)
            here.append(torch.tensor([p + 1 - prompt for p in rows if prompt - 1 <= p < total - 1], dtype=torch.int64))
        return here

    def on_rank(self, values: Tensor, cp_rank: int, cp_size: int, padded: int | None = None) -> Tensor:
        """The part of one value per response token that a context-parallel rank holds."""
        parts = zip(values.split(self.responses), self.held(cp_rank, cp_size, padded), strict=True)
        return torch.cat([part[here] for part, here in parts])

    def sum_of_sample_mean(
        self, cp_rank: int = 0, cp_size: int = 1, *, per_token: bool = False, padded: int | None = None
    ) -> Callable[[Tensor], Tensor]:
        """The host's reducer: the sum over samples of sum(x mask) / denominator, or of sum(x mask) alone."""
        masks = local_masks(self, cp_rank, cp_size, padded)
        divisors = torch.ones(len(masks)) if per_token else self.denominators().clamp(min=1)

        def reduce(x: Tensor) -> Tensor:
            parts = x.split([len(mask) for mask in masks])
            return torch.stack([(p * m).sum() / d for p, m, d in zip(parts, masks, divisors, strict=True)]).sum()

        return reduce


def rollout(seed: int, shapes: Sequence[tuple[int, int]] = SHAPES, spread: float = 0.4) -> Rollout:
    """Random samples: old and rollout log-probs lie near the policy of the logits, ``spread`` apart."""
    random = np.random.RandomState(seed)  # its stream is the same in every version of numpy

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

    tokens, masks, logits = [], [], []
    values: dict[str, list[Tensor]] = {n: [] for n in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages")}
    for prompt, response in shapes:
        ids = torch.from_numpy(random.randint(0, VOCAB, prompt + response))
        tokens.append(ids)
        mask = torch.ones(response, dtype=torch.int32)
        mask[response // 2 : response // 2 + (response > 4)] = 0
        masks.append(mask)
        logits.append(normal(prompt + response, VOCAB))
        policy = logits[-1].log_softmax(-1)[prompt - 1 : -1].gather(1, ids[prompt:, None]).squeeze(1)
        for name in ("log_probs", "rollout_log_probs", "ref_log_probs"):
            values[name].append((policy + spread * normal(response)).clamp(max=0))
        values["advantages"].append(normal(1).expand(response).contiguous())
    return Rollout(tokens, [prompt for prompt, _ in shapes], masks, logits, values)


def positions(length: int, cp_rank: int, cp_size: int) -> list[int]:
    """Positions of a sequence on a rank, those of the padding to 2 cp_size equal chunks too, in their order there."""
    if cp_size == 1:
        return list(range(length))
    chunk = -(-length // (2 * cp_size))
    mine = {cp_rank: 0, 2 * cp_size - 1 - cp_rank: 1}
    return sorted([p for p in range(2 * cp_size * chunk) if p // chunk in mine], key=lambda p: (mine[p // chunk], p))


def micro_batch(whole: Rollout, cp_rank: int = 0, cp_size: int = 1, padded: int | None = None) -> dict[str, Any]:
    """The host's batch on a rank, with the logits [1, T + 3, VOCAB] under "logits"; padded: miles's [B, T, VOCAB]."""
    lengths = [padded or total for total in whole.totals]
    rows = []
    for logits, length in zip(whole.logits, lengths, strict=True):
        where = positions(length, cp_rank, cp_size)
        rows.append(torch.cat([logits, torch.full((2 * cp_size * length, VOCAB), 7.0)])[torch.tensor(where)])
    logits = torch.stack(rows) if padded else torch.cat([*rows, torch.full((3, VOCAB), -3.0)])[None]
    here = whole.held(cp_rank, cp_size, padded)
    local = {name: [value[h] for value, h in zip(each, here, strict=True)] for name, each in whole.values.items()}
    masks = {"loss_masks": whole.loss_masks, "rollout_mask_sums": whole.denominators()}
    given = {"unconcat_tokens": whole.tokens, "max_seq_lens": lengths if padded else None, "logits": logits}
    return {**local, "total_lengths": whole.totals, "response_lengths": whole.responses, **masks, **given}


def given_to_tis(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a host passes to the hook tis of a micro-batch, besides its arguments and the loss."""
    names = ("loss_masks", "total_lengths", "response_lengths", "rollout_log_probs")
    return {"train_log_probs": batch["log_probs"], **{name: batch[name] for name in names}}


def local_masks(whole: Rollout, cp_rank: int, cp_size: int, padded: int | None = None) -> list[Tensor]:
    here = whole.held(cp_rank, cp_size, padded)
    return [mask[tokens] for mask, tokens in zip(whole.loss_masks, here, strict=True)]


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """The host's policy-gradient loss of every token."""
    return torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
