"""What the functions that docs/hosts/patches/ changes do in a tree of their host, for a process of its own.

``python owner_patches.py HOST TREE OUT`` imports them from TREE and saves to OUT what they returned: under "off"
without the new settings, in any tree, and under "on" with them, in a tree with the file PATCHED.
"""

import importlib
import importlib.util
import sys
import typing
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from hosts.absent import Absent
from torch import Tensor

HEAVY = (
    "cachetools", "codetiming", "datasets", "fastapi", "httpx", "hydra", "msgspec", "omegaconf", "openai", "peft",
    "pylatexenc", "ray", "sglang", "sglang_router", "starlette", "tensordict", "torch_memory_saver", "torchdata",
    "transfer_queue", "uvicorn", "wandb", "zmq",
)  # fmt: skip
"""Packages that the trees import. The functions do not use them, or only as the few lines of `stand_ins` do."""


class Config(dict[str, Any]):
    """As much of an OmegaConf DictConfig as the functions use."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tensors(dict[str, Tensor]):
    """As much of a TensorDict."""

    def __init__(self, source: dict[str, Tensor], batch_size: Any) -> None:
        super().__init__(source)
        self.batch_size = batch_size


def stand_ins() -> None:
    sys.meta_path.append(Absent(HEAVY))
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = lambda method: method  # type: ignore[attr-defined]
    few: dict[str, dict[str, Any]] = {
        "omegaconf": {"DictConfig": Config, "ListConfig": list, "open_dict": lambda _: nullcontext()},
        "hydra": {"main": lambda **_: lambda function: function},
        "ray": {"remote": lambda *made, **_: made[0] if made else lambda it: it, "put": lambda it, **_: it},
        "tensordict": {"TensorDict": Tensors},
    }
    for name, parts in few.items():
        if importlib.util.find_spec(name).loader.__class__ is Absent:  # type: ignore[union-attr]
            vars(importlib.import_module(name)).update(parts)


def log_probs() -> dict[str, Tensor]:
    """Log-probs of trainer and engine, and advantages; `corrupt` has a NaN, a -inf and a positive one of the engine."""
    draw = torch.Generator().manual_seed(5)
    train = -torch.rand(4, 9, generator=draw) * 3 - 0.5
    rollout = (train + 0.6 * torch.randn(4, 9, generator=draw)).clamp(max=0)
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[1, 6:], corrupt = False, rollout.clone()
    corrupt[0, 1], corrupt[2, 3], corrupt[3, 8] = torch.nan, -torch.inf, 0.5
    advantages = torch.randn(4, 1, generator=draw).expand(4, 9).contiguous()
    return {"train": train, "rollout": rollout, "corrupt": corrupt, "mask": mask, "advantages": advantages}


def configuration(loss_mode: str, correction: dict[str, Any]) -> Any:
    values = {
        "algorithm": {"use_kl_in_reward": False, "rollout_correction": correction},
        "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": loss_mode}}, "model": {}, "rollout": {}},
        "trainer": {"v1": {"trainer_mode": "sync"}}, "async_training": {},
        "rollout": {"nnodes": 1, "n_gpus_per_node": 1},
    }  # fmt: skip
    omegaconf: Any = importlib.import_module("omegaconf")
    if omegaconf.DictConfig is not Config:
        made = omegaconf.OmegaConf.create(values)
        omegaconf.OmegaConf.set_struct(made, True)
        omegaconf.OmegaConf.set_struct(made.actor_rollout_ref.rollout, False)
        return made

    def nested(given: Any) -> Any:
        return Config({name: nested(each) for name, each in given.items()}) if isinstance(given, dict) else given

    made = nested(values)
    made.actor_rollout_ref["rollout"] = SimpleNamespace()
    return made


def verl(patched: bool) -> dict[str, Any]:
    from verl.experimental.fully_async_policy import fully_async_main
    from verl.trainer import main_ppo
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1 import trainer_base
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    data = log_probs()

    def loss_of(policy: dict[str, Any], current: Tensor, mask: Tensor = data["mask"], **more: Any) -> Any:
        """(loss, metrics) of the loss that an actor with this policy_loss takes."""
        actor = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2,
            policy_loss=PolicyLossConfig(**policy), global_batch_info={"dp_size": 1, "batch_num_tokens": 33},
        )  # fmt: skip
        torch.manual_seed(0)
        return core_algos.get_policy_loss_fn(policy["loss_mode"])(
            old_log_prob=data["rollout"], log_prob=current, advantages=data["advantages"], response_mask=mask,
            loss_agg_mode="token-mean", config=actor, **more,
        )  # fmt: skip

    def weighed(name: str) -> list[Tensor]:
        """The loss of that name without weights, with ones and with twos."""
        policy, ones = {"loss_mode": name, "dro_beta": 0.1}, torch.ones_like(data["train"])
        return [loss_of(policy, data["train"], rollout_is_weights=each)[0] for each in (None, ones, 2 * ones)]

    def update(loss_mode: str = "vanilla", mask: Tensor = data["mask"], **correction: Any) -> Any:
        """Loss, gradient and names of the metrics of the actor that V1's trainer configures, or what it raises."""
        config = configuration(loss_mode, {"rollout_is_threshold": 2.0, **correction})
        needs = ("need_critic", "need_reference_policy", "need_teacher_policy")
        made: dict[str, Any] = dict.fromkeys(needs, lambda _: False)
        made["RolloutMoELoadBalanceMetricsAccumulator"] = MagicMock()
        try:
            with patch.multiple(trainer_base, **made):
                trainer_base.PPOTrainer.__init__(MagicMock(), config)
        except ValueError as error:
            return str(error)
        current = data["train"].clone().requires_grad_()
        loss, metrics = loss_of(dict(config.actor_rollout_ref.actor.policy_loss.items()), current, mask)
        return loss.detach(), torch.autograd.grad(loss, current)[0], sorted(metrics)

    def program(**correction: Any) -> str:
        """What the fully asynchronous program does."""
        same: dict[str, Any] = {"auto_set_device": lambda _: None, "migrate_legacy_reward_impl": lambda config: config}
        ran: list[str] = []
        run = patch.object(main_ppo, "run_ppo", lambda *_, **__: ran.append("runs"))
        with patch.multiple(fully_async_main, **same), run:
            try:
                fully_async_main.main(configuration("vanilla", correction))
            except ValueError as error:
                return str(error)
        return ran[0]

    everything: dict[str, Any] = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    found: dict[str, Any] = {"off": {
        "none": update(), "bypass": update(bypass_mode=True, loss_type="ppo_clip"),
        "gspo": update("gspo", bypass_mode=True), "three policies": update(**everything, bypass_mode=False),
        "weighed": {name: weighed(name) for name in core_algos.POLICY_LOSS_REGISTRY},
        "program": [program(), program(bypass_mode=True), program(**everything, bypass_mode=False)],
    }}  # fmt: skip
    if patched:
        on: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}
        found["on"] = {
            **data, "reinforce": update(**on, rollout_is="token"), "rejected": update(bypass_mode=True, **everything),
            "padding": update(bypass_mode=True, **everything, mask=torch.zeros_like(data["mask"])),
            "gspo": update("gspo", **on), "program": program(**on, rollout_rs="token_k1"),
        }  # fmt: skip
    return found


SEEN: dict[str, Any] = {}


def plain_hook(
    args: Any, *, pg_loss: Tensor, train_log_probs: list[Tensor], rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor], total_lengths: list[int], response_lengths: list[int],
) -> Any:  # fmt: skip
    """As strict as a hook can be."""
    return pg_loss * 0.5, loss_masks, {}


def open_hook(args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], **others: Any) -> Any:
    SEEN["others"] = sorted(others)
    return pg_loss * 0.5, loss_masks, {}


def asking_hook(
    args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], rollout_log_probs: list[Tensor],
    current_log_probs: list[Tensor], advantages: list[Tensor], weight_versions: Any = "none", **_: Any,
) -> Any:  # fmt: skip
    """-w A log pi with w = min(pi / mu, 2): REINFORCE of two policies, which needs all three."""
    current, rollout = torch.cat(current_log_probs), torch.cat(rollout_log_probs)
    SEEN.update(current=current.detach(), rollout=rollout, versions=weight_versions)
    weights = (current.detach() - rollout).exp().clamp(max=2)
    return -weights * torch.cat(advantages) * current, loss_masks, {}


def slime(patched: bool) -> dict[str, Any]:
    from hosts.slime.host import arguments, micro_batch, rollout
    from megatron.core import mpu
    from slime.backends.megatron_utils import cp_utils, loss
    from slime.observability import train_metric_utils
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    ranks = {"rank": 0, "world_size": 1, "group": None}
    places = ("tensor_model_parallel", "context_parallel", "data_parallel")
    alone: dict[str, Any] = {f"get_{place}_{n}": lambda n=n, **_: ranks[n] for place in places for n in ranks}
    whole = rollout(26)

    def update(hook: str | None, **more: Any) -> Any:
        path = f"{__name__}.{hook}" if hook else None
        args = arguments(use_tis=True, custom_tis_function_path=path)
        batch = {**micro_batch(whole), **more}
        leaf = batch["logits"].clone().requires_grad_()
        keys = ("total_lengths", "response_lengths", "loss_masks", "rollout_mask_sums")
        with patch.multiple(mpu, create=True, **alone):
            reduce = cp_utils.get_sum_of_sample_mean(*(batch[key] for key in keys), False)
            value, _ = loss.policy_loss_function(args, batch, leaf * 1, reduce)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    def shipped(path: str | None, versions: list[list[str]]) -> list[str]:
        """What the rollout manager sends to a data-parallel rank, and its metrics take."""
        manager: Any = object.__new__(RolloutManager)
        manager.custom_convert_samples_to_train_data_func = None
        manager.args = Namespace(custom_tis_function_path=path, rollout_top_p=1.0, global_batch_size=2)
        manager._post_process_rewards = lambda samples: ([1.0] * len(samples), [1.0] * len(samples))
        manager.train_parallel_config = {"dp_size": 1}
        answer: dict[str, Any] = {"tokens": [1, 2, 3], "response_length": 2}
        samples = [Sample(index=i, weight_versions=each, **answer) for i, each in enumerate(versions)]
        data = manager._convert_samples_to_train_data(samples)
        split = [[[1, 0]], [[[0, 1]]], [1], [2]]
        with patch("slime.ray.rollout.build_dp_schedule", lambda *_, **__: split):
            (box,) = manager._split_train_data_by_dp(data)
        sent = box.inner
        SEEN["shipped"] = sent.get("weight_versions")
        logged: dict[str, Any] = {}
        quiet = dict.fromkeys(("ci_test", "log_multi_turn", "log_passrate", "log_correct_samples"), False)
        with (
            patch.multiple(mpu, create=True, is_pipeline_last_stage=lambda: True, **alone),
            patch.object(train_metric_utils, "gather_log_data", lambda kind, args, step, values: logged.update(values)),
        ):
            train_metric_utils.log_rollout_data(0, Namespace(**quiet), {**sent, "total_lengths": [3, 3]})
        return [*sorted(sent), *sorted(logged)]

    found: dict[str, Any] = {"off": {
        **{str(hook): update(hook) for hook in (None, "plain_hook", "open_hook")}, "others": SEEN["others"],
        "shipped": [shipped(None, [["1"], ["2", "3"]]), shipped("a.hook", [[], []])],
    }}  # fmt: skip
    if patched:
        update("asking_hook", weight_versions=None)
        versions = [SEEN["versions"]]
        value, gradient = update("asking_hook", weight_versions=[["1"], ["2", "3"], [], ["4"]])
        versions.append(SEEN["versions"])
        names = shipped("a.hook", [["1"], ["2", "3"]])
        masks, advantages = torch.cat(whole.loss_masks), torch.cat(whole.values["advantages"])
        found["on"] = {
            "loss": value, "gradient": gradient, "versions": versions, "names": names, "shipped": SEEN["shipped"],
            "rollout": SEEN["rollout"], "masks": masks,
            "current": SEEN["current"], "logits": whole.current(micro_batch(whole)["logits"]),
            "advantages": advantages, "lengths": whole.responses, "denominators": whole.denominators(),
        }  # fmt: skip
    return found


def megatron_lm(patched: bool) -> dict[str, Any]:
    from megatron.rl import rl_utils, sequence_packing_utils

    data = log_probs()
    advantages = data["advantages"][:, 0]

    def loss(rollout: Tensor | None, **more: Any) -> Tensor:
        return rl_utils.calculate_grpo_loss(
            current_logprobs=data["train"] + 0.1, old_logprobs=data["train"], ref_logprobs=data["train"] - 0.2,
            advantages=advantages, clamp_eps_lower=0.2, clamp_eps_upper=0.28, kl_beta=more.pop("kl_beta", 0.1),
            entropy_weight=0.0, inference_logprobs=rollout, **more,
        )[0]  # fmt: skip

    generated = torch.nn.functional.pad(data["mask"], (1, 0))
    short = [row[: 9 if i != 1 else 6][: 7 - i] for i, row in enumerate(data["rollout"])]
    """The engine leaves out the last log-probs of three answers."""

    def statistics(**more: Any) -> Any:
        stats = SimpleNamespace()
        aligned = rl_utils.align_unpacked_inference_logprobs(short, data["train"], generated, stats, **more)
        return aligned, vars(stats)

    def packed(rows: list[Tensor] | Tensor) -> Any:
        """One sequence per bin."""
        info: Any = SimpleNamespace(bin_seq_indices=[[0], [1], [2], [3]], seq_starts=[[0]] * 4, seq_lengths=[10] * 4)
        placed, filled = sequence_packing_utils.pack_inference_logprobs(rows, info, generated, 10)
        stats = SimpleNamespace()
        sequence_packing_utils.compute_packed_inference_logprobs_stats(data["train"], placed, generated, stats, filled)
        return placed, vars(stats)

    found: dict[str, Any] = {"off": {
        "loss": loss(data["rollout"]), "uncorrected": loss(None), "aligned": statistics(), "packed": packed(short),
        "truncated": loss(data["rollout"], is_truncation_coef=1.2),
    }}  # fmt: skip
    if patched:
        bounds: dict[str, Any] = {"kl_beta": 0.0, "is_bounds": [0.5, 2.0]}
        rows = [torch.nn.functional.pad(row, (0, 9 - len(row)), value=torch.nan) for row in short]
        found["on"] = {
            **data, "bounded": loss(data["corrupt"], **bounds), "one": loss(None, kl_beta=0.0),
            "both": loss(data["rollout"], **bounds, is_truncation_coef=1.2), "short": [len(row) for row in short],
            "aligned": statistics(missing_is_nan=True), "packed": packed(rows), "whole": packed(data["corrupt"]),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    host, tree, out = sys.argv[1:4]
    # hooks are loaded by the name of a module
    sys.modules.setdefault("owner_patches", sys.modules["__main__"])
    __name__ = "owner_patches"
    sys.path[:0] = [tree]
    stand_ins()
    torch.set_num_threads(1)
    torch.save({"verl": verl, "slime": slime, "megatron_lm": megatron_lm}[host](Path(tree, "PATCHED").exists()), out)
