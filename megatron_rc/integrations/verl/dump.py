"""Dump both log-probs of every step of a verl run for ``megatron-rc analyze``; docs/hosts/verl.md shows how.

verl calls ``calculate_debug_metrics`` once per step, before the update, with the log-probs of sampler and trainer.
"""

import os
from typing import Any

import torch
from verl.utils.debug import metrics

measure = metrics.calculate_debug_metrics


def dump_and_measure(data: Any) -> dict[str, Any]:
    names = ("old_log_probs", "rollout_log_probs", "response_mask", "responses", "entropy")
    present = {name: data.batch.get(name, None) for name in names}
    saved = {name: values.detach().cpu().clone() for name, values in present.items() if values is not None}
    if (sources := getattr(data, "non_tensor_batch", {}).get("data_source")) is not None:
        saved["data_source"] = [str(source) for source in sources]
    folder = os.environ["VERL_DUMP"]
    step = len(os.listdir(folder))
    torch.save({"step": step, **saved}, os.path.join(folder, f"{step:06d}.pt"))
    metrics_of_verl: dict[str, Any] = measure(data)
    return metrics_of_verl


metrics.calculate_debug_metrics = dump_and_measure
