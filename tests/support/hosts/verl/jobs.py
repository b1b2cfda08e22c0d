"""What verl's own functions answer, alone and patched; `sources.job` runs a function of this file in the real verl.

``python -W ignore jobs.py COMMIT > golden.json`` in such an environment records what the tests compare with elsewhere.
"""

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
import verl
from hosts.verl import cases
from hosts.verl.stand_in import patched
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer, rollout_corr_helper
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_to_nested

from megatron_rc.integrations.verl import driver
from megatron_rc.integrations.verl.settings import prepared, read

OWN = rollout_corr_helper.compute_rollout_correction_and_rejection_mask
PROMPT = 2


def text(case: str, **fields: Any) -> str:
    """Settings for a case."""
    return json.dumps({"correction": cases.correction(case, **fields.pop("correction", {})).to_dict(), **fields})


def number(value: float) -> float:
    """With the digits that fp32 has."""
    return float(f"{value:.8g}")


def table() -> dict[str, Any]:
    """verl's weights, masks and metrics for every case and batch."""
    answers = {}
    shared = [f"rollout_corr/{name}" for name in (*driver.SAME, "chi2_token", "chi2_seq")]  # of one name in both
    for name, case in cases.CASES.items():
        for seed in cases.SEEDS:
            batch = cases.rollout(seed)
            proto, mask, metrics = OWN(batch.old, batch.rollout, batch.mask, **case.verl)
            weights = torch.ones_like(batch.old) if proto is None else proto.batch["rollout_is_weights"]
            known = {key: number(value) for key, value in metrics.items() if key in shared}
            weights = [[number(value) for value in row] for row in (weights * mask).tolist()]
            answers[f"{name}, {seed}"] = {"weights": weights, "metrics": known}
    return answers


def panels() -> dict[str, Any]:
    """Everything that verl logs of a rollout, alone and patched, by case."""
    batch, answers = cases.rollout(1), {}
    fields = {"old_log_probs": batch.old, "rollout_log_probs": batch.rollout, "response_mask": batch.mask}
    for name, case in cases.CASES.items():
        with patched(text(name)):
            both = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(DataProto.from_dict(fields), {})
        answers[name] = {"theirs": OWN(*fields.values(), **case.verl)[2], "ours": both[1]}
    return answers


class Queue:
    """A TransferQueue in this process."""

    def __init__(self, fields: dict[str, Any], rows: int) -> None:
        self.fields, self.rows = fields, rows

    def kv_batch_get(self, keys: Any, partition_id: Any, select_fields: list[str]) -> TensorDict:
        return TensorDict({name: self.fields[name] for name in select_fields if name in self.fields}, [self.rows])

    def kv_batch_put(self, keys: Any, partition_id: Any, fields: Any) -> Any:
        self.fields |= dict(fields.items())
        return self.meta()

    def meta(self) -> Any:
        keys = [f"p_{row}_0" for row in range(self.rows)]

        class Meta(SimpleNamespace):
            def __len__(self) -> int:
                return len(self.keys)

        return Meta(keys=keys, partition_id="train", extra_info={}, tags=[{}] * self.rows)


CONFIG = {
    "algorithm": {
        "adv_estimator": "grpo", "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0, "kl_penalty": "kl",
        "rollout_correction": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False},
    },
    "actor_rollout_ref": {
        "actor": {
            "ppo_mini_batch_size": 6, "calculate_entropy": False, "entropy_coeff": 0.0, "ppo_epochs": 1,
            "data_loader_seed": 1, "shuffle": False,
        },
        "rollout": {"n": 1, "temperature": 1.0, "multi_turn": {"enable": False}, "calculate_log_probs": True},
    },
}  # fmt: skip


def config(**correction: Any) -> Any:
    made = OmegaConf.create(CONFIG)
    made.algorithm.rollout_correction.update(correction)
    return made


def update_v1(batch: cases.Rollout, **correction: Any) -> tuple[TensorDict, dict[str, float]]:
    """What V1's trainer process hands to the workers: correction, advantages, update."""
    shape = torch.where(batch.old != 0, 1, 0)
    masks = [row[: int(length)] for row, length in zip(batch.mask, shape.sum(-1), strict=True)]
    template = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    nested = partial(response_to_nested, response_mask=template)
    rows = len(batch.mask)
    fields: dict[str, Any] = {"response_mask": template, "loss_mask": nested(batch.mask), "uid": torch.arange(rows)}
    fields |= {"rollout_log_probs": nested(batch.rollout), "old_log_probs": nested(batch.old)}
    fields["rm_scores"] = nested(torch.zeros_like(batch.old).index_fill_(1, torch.tensor([0]), 1.0))
    queue = Queue(fields, rows)
    trainer = object.__new__(get_trainer_cls("sync"))
    trainer.config, trainer.distillation_config = config(**correction), None
    trainer.actor_rollout_wg = SimpleNamespace(update_actor=lambda batch: {"metrics": {"mfu": [0.0]}})
    metrics: dict[str, float] = {}
    with patch.multiple(trainer_base, tq=queue, is_distillation_enabled=lambda config: False):
        trainer._update_actor(trainer._compute_advantage(queue.meta(), metrics), metrics)
    fields["advantages"] = nested(batch.advantages)
    return TensorDict({name: value for name, value in queue.fields.items() if name != "uid"}, [rows]), metrics


def update_v0(batch: cases.Rollout, **correction: Any) -> tuple[TensorDict, dict[str, float]]:
    """The same through V0's lazily imported function and its _update_actor."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    rows = len(batch.mask)
    fields = {"old_log_probs": batch.old, "rollout_log_probs": batch.rollout}
    fields |= {"response_mask": batch.mask, "advantages": batch.advantages}
    settings = config(**correction).algorithm.rollout_correction
    proto, metrics = compute_rollout_correction_and_add_to_batch(DataProto.from_dict(fields), settings)
    lengths = (batch.old != 0).long()
    prompt = torch.ones(rows, PROMPT, dtype=torch.int64)
    proto.batch["input_ids"] = torch.cat([prompt, lengths], 1)
    proto.batch["attention_mask"] = torch.cat([prompt, lengths], 1)
    proto.batch["position_ids"] = torch.arange(PROMPT + lengths.shape[1]).expand(rows, -1).clone()
    update_actor = Mock(return_value=tu.get_tensordict({}, {"metrics": {"mfu": [0.0]}}))
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config, trainer.distillation_config = config(**correction), None
    trainer.actor_rollout_wg = SimpleNamespace(update_actor=update_actor)
    with patch.object(ray_trainer, "is_distillation_enabled", lambda config: False):
        trainer._update_actor(proto)
    return update_actor.call_args.args[0], metrics


def update(batch: cases.Rollout, data: Any, cut: int, loss_mode: str = "vanilla") -> dict[str, Any]:
    """Loss and gradient of verl's ppo_loss, as its engines sum them over ``cut`` micro-batches."""
    mask = data["loss_mask"]
    counted = int((mask.values() if mask.is_nested else mask).sum())
    policy, total, gradient = PolicyLossConfig(loss_mode=loss_mode), 0.0, []
    actor = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy)
    for rows in torch.arange(len(batch.mask)).chunk(cut):
        lengths = [int((batch.old[row] != 0).sum()) for row in rows]
        leaves = [
            torch.cat([torch.zeros(PROMPT - 1), batch.current[row, :length], torch.zeros(1)]).requires_grad_()
            for row, length in zip(rows.tolist(), lengths, strict=True)
        ]
        names = ("response_mask", "old_log_probs", "advantages", "rollout_is_weights")
        fields = {name: _rows(data[name], rows, lengths) for name in names if data.get(name, None) is not None}
        prompts = torch.nested.as_nested_tensor([torch.ones(PROMPT) for _ in lengths], layout=torch.jagged)
        responses = torch.nested.as_nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)
        micro = TensorDict({**fields, "prompts": prompts, "responses": responses}, [len(lengths)])
        tu.assign_non_tensor(micro, dp_size=1, batch_num_tokens=counted, global_batch_size=len(batch.mask))
        offsets = torch.tensor([0, *(length + PROMPT for length in lengths)]).cumsum(0)
        log_probs = torch.nested.nested_tensor_from_jagged(torch.cat(leaves), offsets)
        loss, _ = ppo_loss(actor, {"log_probs": log_probs}, micro)
        loss.backward()
        total += loss.item()
        for leaf, length in zip(leaves, lengths, strict=True):
            padded = torch.nn.functional.pad(leaf.grad[PROMPT - 1 : -1], (0, batch.mask.shape[1] - length))
            gradient.append([number(value) for value in padded.tolist()])
    return {"loss": total, "gradient": gradient, "counted": counted}


def _rows(values: Tensor, rows: Tensor, lengths: list[int]) -> Tensor:
    parts = values.unbind(0) if values.is_nested else values
    chosen = [parts[row][:length] for row, length in zip(rows.tolist(), lengths, strict=True)]
    return torch.nested.as_nested_tensor(chosen, layout=torch.jagged)


TIS_AND_GATE = "token-tis and seq_mean_k3"


def updates() -> dict[str, Any]:
    """Loss, gradient and denominator of an update in V1 and V0, by verl's own correction and by ours."""
    batch, answers = cases.rollout(1), {}
    for version, make in (("V1", update_v1), ("V0", update_v0)):
        own, metrics = make(batch, **cases.CASES[TIS_AND_GATE].verl)
        answers[f"{version} own"] = {**update(batch, own, 1), "metrics": metrics}
        for denominator in ("original", "kept"):
            with patched(text(TIS_AND_GATE, denominator=denominator)):
                data, metrics = make(batch)
                for loss_mode in ("vanilla", "megatron_rc"):
                    for cut in (1, 2, 6):
                        name = f"{version} {denominator} {loss_mode} {cut}"
                        answers[name] = {**update(batch, data, cut, loss_mode=loss_mode), "metrics": metrics}
    return answers


def bypass() -> dict[str, Any]:
    """Loss and gradient of loss_mode=megatron_rc with old "rollout", as verl's bypass_mode hands over the batch."""
    batch, answers = cases.rollout(2), {}
    data = {"response_mask": batch.mask, "loss_mask": batch.mask}
    data |= {"old_log_probs": batch.rollout, "advantages": batch.advantages}
    for name, fields in BYPASS.items():
        settings = read(json.dumps(fields))
        for cut in (1, 2, 6):
            with patched(json.dumps(fields)) as session:
                session.sums.clear()
                answers[f"{name} {cut}"] = update(batch, data, cut, loss_mode="megatron_rc")
                (sums,) = session.sums
                answers[f"{name} {cut}"]["metrics"] = driver.checked_metrics(prepared(settings), sums)
    return answers


BYPASS: dict[str, dict[str, Any]] = {
    "ppo": {"correction": {"old": "rollout"}},
    "ppo with a gate": {"correction": {"old": "rollout", **cases.CASES["seq_mean_k3"].ours}},
    "reinforce": {"correction": {"old": "rollout", **cases.CASES["token-tis"].ours}, "surrogate": "reinforce"},
}


def corrupt() -> dict[str, Any]:
    """Loss and gradient with a NaN of the sampler, and one of the trainer: verl's own and ours."""
    answers = {}
    for name in ("rollout", "old"):
        batch = cases.rollout(3, rows=24)
        getattr(batch, name)[4, 0] = float("nan")
        own, _ = update_v1(batch, **cases.CASES["token-tis"].verl)
        answers[f"{name} verl"] = update(batch, own, 1)
        with patched(text("token-tis")):
            data, _ = update_v1(batch)
            answers[f"{name} ours"] = update(batch, data, 1, loss_mode="megatron_rc")
    return answers


def answers() -> dict[str, Any]:
    """Answers by name of the function."""
    return {function.__name__: function() for function in (table, panels, updates, bypass, corrupt)}


def main() -> None:
    recorded = {name: each for name, each in table().items() if int(name.rpartition(" ")[2]) in cases.SEEDS[:2]}
    own = {name: each for name, each in updates().items() if name.endswith("own")}
    version = {"verl": verl.__version__, "commit": sys.argv[1]}
    json.dump({**version, "table": recorded, "updates": own}, sys.stdout, separators=(",", ":"))


if __name__ == "__main__":
    main()
