"""slime's example train_infer_mismatch_helper: its arguments, next to the correction of ours that does the same.

``SLIME_DIR=<source tree> python tests/support/hosts/slime/mismatch.py COMMIT`` writes mismatch.json: the metrics of the
example's own function, for every response token of the samples of `cases.whole`.
"""

import json
import os
import sys
from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))

from hosts.slime.cases import whole

RECORDED = Path(__file__).parent / "mismatch.json"
TREES = {
    "slime": ("SLIME_DIR", "examples/train_infer_mismatch_helper/mis.py"),
    "miles": ("MILES_DIR", "examples/infra_features/train_infer_mismatch_helper/mis.py"),
}
"""Host -> the variable that names its source tree, and its example there."""


class Setting(NamedTuple):
    correction: dict[str, Any]
    example: dict[str, Any]


def _gate(lower: float, upper: float | None = None, *, level: str = "sequence", reduce: str = "sum") -> dict[str, Any]:
    return {"statistic": "ratio", "level": level, "reduce": reduce, "lower": lower, "upper": upper}


SETTINGS = {
    "token": Setting(
        {"weight": {"mode": "truncate", "upper": 1.3}, "reject": [_gate(0.7, 1.5, level="token")]},
        {"tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 1.3, "rs_level": "token"}
        | {"use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 1.5},
    ),
    "sequence": Setting(
        {
            "weight": {"level": "sequence", "mode": "clip", "lower": 0.5, "upper": 1.5},
            "reject": [_gate(0.9, 1.1, reduce="mean"), _gate(0.6, reduce="min")],
        },
        {"tis_level": "sequence", "tis_mode": "clip", "tis_lower_bound": 0.5, "tis_upper_bound": 1.5}
        | {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1}
        | {"rs_veto_threshold": 0.6},
    ),
    "geometric": Setting(
        {"weight": {"level": "geometric", "mode": "mask", "lower": 0.95, "upper": 1.1}, "reject": [_gate(0.4, 2.0)]},
        {"tis_level": "geometric", "tis_mode": "mask", "tis_lower_bound": 0.95, "tis_upper_bound": 1.1}
        | {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.4, "rs_upper_bound": 2.0},
    ),
    "metrics alone": Setting({}, {"use_tis": False, "tis_level": "token", "tis_mode": "truncate"}),
}


def recorded() -> dict[str, dict[str, Tensor]]:
    """Setting -> name -> [N], as the example of the commit in the file returned them."""
    runs = json.loads(RECORDED.read_text())["settings"]
    return {key: {name: torch.tensor(values) for name, values in run.items()} for key, run in runs.items()}


def module_of(name: str, path: Path) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_the_host(host: str, key: str) -> dict[str, Tensor]:
    """The same from the example in the host's source tree."""
    variable, path = TREES[host]
    module = module_of(f"{host}_mis", Path(os.environ[variable]) / path)
    defaults = dict.fromkeys(("tis_lower_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"))
    switches = {"use_tis": True, "use_rs": False, "tis_batch_normalize": False, "tis_upper_bound": 2.0}
    args = Namespace(**{**defaults, **switches, **SETTINGS[key].example})
    samples = whole()
    *_, metrics = module.compute_mis_weights(
        args,
        train_log_probs=samples.values["log_probs"],
        rollout_log_probs=samples.values["rollout_log_probs"],
        loss_masks=samples.loss_masks,
    )
    return {f"mis_{name}": torch.cat(values).float() for name, values in metrics.items()}


def _record(commit: str) -> None:
    settings = {
        key: {name: [round(x, 7) for x in values.tolist()] for name, values in of_the_host("slime", key).items()}
        for key in SETTINGS
    }
    RECORDED.write_text(json.dumps({"commit": commit, "settings": settings}) + "\n")


if __name__ == "__main__":
    _record(sys.argv[1])
