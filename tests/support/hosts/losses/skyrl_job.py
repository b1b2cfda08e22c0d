"""A micro-batch through losses of SkyRL's registry: its own, which corrects, and the file of the page."""

import json
from typing import Any

import rc_skyrl
from hosts.verl import cases
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config import AlgorithmConfig

from megatron_rc import RolloutCorrection

GATE = {"statistic": "ratio", "level": "sequence", "reduce": "mean", "lower": 0.9, "upper": 1.1}
MASK = RolloutCorrection.from_dict({"reject": [GATE]})
SEQUENCE = RolloutCorrection.from_dict({"weight": {"level": "sequence", "upper": 1.5}})
CASES: dict[str, tuple[dict[str, Any], RolloutCorrection]] = {
    "token": ({"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}, rc_skyrl.RULE),
    "sequence": ({"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5}, SEQUENCE),
    "geometric mask": ({"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1}, MASK),
    "none": ({}, RolloutCorrection.preset("none")),
}


def answer(config: AlgorithmConfig) -> dict[str, Any]:
    batch = cases.rollout(0)
    current = batch.current.clone().requires_grad_()
    more = {"config": config, "loss_mask": batch.mask.float(), "rollout_logprobs": batch.rollout}
    loss, metrics = PolicyLossRegistry.get(config.policy_loss_type)(current, batch.old, batch.advantages, **more)
    loss.backward()
    return {"loss": loss.item(), "gradient": current.grad.tolist(), "metrics": metrics}


def main() -> None:
    found = {}
    for name, (theirs, rule) in CASES.items():
        rc_skyrl.RULE = rule
        own = AlgorithmConfig(policy_loss_type="regular")
        for field, value in theirs.items():
            assert hasattr(own.off_policy_correction, field)
            setattr(own.off_policy_correction, field, value)
        found[name] = {"own": answer(own), "ours": answer(AlgorithmConfig(policy_loss_type="megatron_rc"))}
    print("ANSWER", json.dumps(found))


if __name__ == "__main__":
    main()
