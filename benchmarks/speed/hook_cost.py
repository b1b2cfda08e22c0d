"""What the hooks of each host cost beside the loss of the same tokens: operations, elements written, CPU time.

    python benchmarks/speed/hook_cost.py                       # 65,536 tokens, the table of docs/results.md
    python benchmarks/speed/hook_cost.py --tokens 4096 --vocabulary 4096 --repeats 1

The loss is the least that a step of a host computes besides its model: the log-softmax over the vocabulary, PPO's
clipped loss, and the gradient of the logits, in micro-batches of 2,048 tokens. Hook and loss are timed alternately, in
CPU time of this process; ratios are of medians.
"""

import argparse
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path += map(str, Path(__file__).parents[1:3])

from megatron_rc import RolloutCorrection
from megatron_rc.integrations import slime
from megatron_rc.integrations.megatron_lm.rollouts import RolloutRows, corrected_rows
from megatron_rc.integrations.nemo_rl import driver as nemo_rl
from megatron_rc.integrations.nemo_rl import session as nemo_session
from megatron_rc.integrations.slime.hooks import tis as tis_hook
from megatron_rc.integrations.slime.layout import Parallel
from megatron_rc.integrations.verl import driver as verl
from megatron_rc.integrations.verl import settings as verl_settings
from megatron_rc.jobs.describe import table
from speed.operations import OperationCount

LENGTH, MICRO_BATCH = 4096, 2048
CORRECTIONS = ("none", "token-tis", "geo-mask-token-tis")


class Work(OperationCount):
    """Counts operations that compute, and the elements that they write."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = super().__torch_dispatch__(function, types, args, kwargs)
        if not function.is_view:
            written = answer if isinstance(answer, tuple | list) else [answer]
            self.elements += sum(each.numel() for each in written if isinstance(each, Tensor))
        return answer


class Rollout(NamedTuple):
    """Log-probs of S responses of equal length, each [S, T], and advantages [S]."""

    old: Tensor
    sampled: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, tokens: int) -> "Rollout":
        draw = torch.Generator().manual_seed(0)
        length = min(LENGTH, tokens)
        old = -torch.rand(tokens // length, length, generator=draw) * 3 - 1
        return cls(old, old + 0.03 * torch.randn(old.shape, generator=draw), torch.randn(len(old), generator=draw))


def slime_hook(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """tis, which sees the micro-batches of the update; here all tokens in one."""
    nobody: dict[str, Any] = dict.fromkeys(("tp_group", "cp_group", "dp_group", "dp_cp_group"))
    tis_hook.parallel = lambda: Parallel(**nobody, cp_rank=0, cp_size=1, last_stage=True)
    args = Namespace(use_tis=True, megatron_rc={"correction": correction.to_dict()})
    lengths = [rollout.old.shape[1]] * len(rollout.old)
    given = {
        "train_log_probs": list(rollout.old),
        "rollout_log_probs": list(rollout.sampled),
        "loss_masks": [torch.ones(length, dtype=torch.int32) for length in lengths],
        "total_lengths": [length + 1 for length in lengths],
        "response_lengths": lengths,
    }
    pg_loss = rollout.old.flatten()
    return lambda: slime.tis(args, pg_loss=pg_loss, **given)


def slime_hook_and_means(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """tis, and what slime does with each of its metrics: the mean over the loss tokens of every response, summed."""
    hook = slime_hook(rollout, correction)
    lengths = [rollout.old.shape[1]] * len(rollout.old)
    masks = [torch.ones(length, dtype=torch.int32) for length in lengths]

    def means() -> list[Tensor]:
        *_, metrics = hook()
        parts = [zip(values.split(lengths), masks, strict=True) for values in metrics.values()]
        return [torch.stack([(v * mask).sum() / mask.sum().clamp(min=1) for v, mask in each]).sum() for each in parts]

    return means


def verl_hook(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the trainer process, with its metrics."""
    state = verl_settings.prepare(correction, None)
    mask = torch.ones_like(rollout.old, dtype=torch.int64)

    def hook() -> Any:
        fields = {"old_log_probs": rollout.old, "rollout_log_probs": rollout.sampled, "response_mask": mask}
        return verl.correct_rollout(lambda *args: None, state, SimpleNamespace(batch=fields), {})

    return hook


def nemo_rl_hook(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the driver around Policy.train, with its metrics."""
    state = nemo_session.prepare(correction, None)
    loss = SimpleNamespace(use_importance_sampling_correction=False)
    first = torch.zeros(len(rollout.old), 1)
    data = {
        "prev_logprobs": torch.cat([first, rollout.old], 1),
        "generation_logprobs": torch.cat([first, rollout.sampled], 1),
        "advantages": rollout.advantages[:, None].expand(-1, rollout.old.shape[1] + 1).contiguous(),
        "token_mask": torch.cat([first, torch.ones_like(rollout.old)], 1),
        "sample_mask": torch.ones(len(rollout.old)),
    }

    def train(data: Any, loss_fn: Any) -> Any:
        return {"all_mb_metrics": {}}

    return lambda: nemo_rl.corrected_train(train, state, None, data, loss)


def megatron_lm_hook(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the rollout batch in prepare_data_for_update, with its metrics."""
    mask = torch.ones_like(rollout.old, dtype=torch.bool)
    rows = RolloutRows(rollout.old, rollout.sampled, mask, rollout.advantages, None)
    return lambda: corrected_rows(rollout.old, rows, correction)[0].metrics.values()


HOOKS = {
    "slime `tis`": slime_hook,
    "slime `tis` and slime's means": slime_hook_and_means,
    "verl trainer process": verl_hook,
    "NeMo-RL driver": nemo_rl_hook,
    "Megatron-LM rollout batch": megatron_lm_hook,
}


def own_loss(rollout: Rollout, vocabulary: int) -> None:
    """Log-probs from logits, PPO's clipped loss, and the gradient of the logits, one micro-batch after another."""
    old = rollout.old.flatten()
    advantages = rollout.advantages[:, None].expand_as(rollout.old).flatten()
    base = torch.randn(min(MICRO_BATCH, len(old)), vocabulary)
    for begin in range(0, len(old), len(base)):
        part = slice(begin, begin + len(base))
        logits = base.detach().requires_grad_()
        targets = torch.arange(len(base)) % vocabulary
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        ratio = (logprobs - old[part]).exp()
        loss = torch.maximum(-ratio * advantages[part], -ratio.clamp(0.8, 1.28) * advantages[part]).sum() / len(old)
        loss.backward()


def counted(call: Callable[[], Any]) -> Work:
    with Work() as work:
        call()
    return work


def seconds(call: Callable[[], Any]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=3, help="of the loss; hooks run ten times as often")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rollout = Rollout.of(options.tokens)
    hooks = {
        (host, name): make(rollout, RolloutCorrection.preset(name))
        for host, make in HOOKS.items()
        for name in CORRECTIONS
    }
    loss = counted(lambda: own_loss(rollout, options.vocabulary))
    work = {key: counted(hook) for key, hook in hooks.items()}
    times: dict[Any, list[float]] = {key: [] for key in (*hooks, "loss")}
    for _ in range(options.repeats):
        times["loss"].append(seconds(lambda: own_loss(rollout, options.vocabulary)))
        for key, hook in hooks.items():
            times[key] += [seconds(hook) for _ in range(10)]
    of_loss = statistics.median(times["loss"])
    print(f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,}: the loss takes {of_loss:.2f} s of CPU time,")
    print(f"{loss.operations.total():,} operations that write {loss.elements:,} elements.\n")
    rows = []
    for (host, name), found in work.items():
        median = statistics.median(times[host, name])
        counts = [f"{found.operations.total()}", f"{found.elements / loss.elements:.3%}"]
        rows.append([host, f"`{name}`", *counts, f"{1000 * median:.1f}", f"{median / of_loss:.2%}"])
    heads = ("hook", "correction", "operations", "elements, share of the loss", "CPU ms", "share of the loss")
    print(table(heads, rows), end="")


if __name__ == "__main__":
    main()
