"""Made-up results of a small lab: runs with known failures, for the tests of the verdict."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from collapse.rows import SIGNALS, Point, Row, merge
from megatron_rc.report.endpoints import Endpoints, outcome

STAGE = "made-up"
STEPS = 120


def write(folder: Path, seeds: Sequence[int] = tuple(range(1, 11))) -> None:
    """Rows and curves of 10 seeds: lag kills runs without correction and `seq-tis` saves them; noise does nothing."""
    rows, points = [], []
    for mechanism, strength, method, lr, death in ARMS:
        for seed in seeds:
            row, curve = run(mechanism, strength, method, lr, seed, seed in death)
            rows.append(row)
            points += curve
    merge(rows, STAGE, Row, folder)
    merge(points, STAGE, Point, folder)


ALL = range(1, 11)
ARMS: list[tuple[str, str, str, float, Sequence[int]]] = [
    ("exact", "", "none", 3e-4, ()),
    ("exact", "", "none", 1e-4, ()),
    ("exact", "", "seq-tis", 3e-4, ()),
    ("lag", "4", "none", 3e-4, (4,)),
    ("lag", "16", "none", 3e-4, ALL),
    ("lag", "16", "none", 1e-4, (1, 2, 3, 4)),
    ("lag", "16", "token-tis", 3e-4, (7,)),
    ("lag", "16", "seq-tis", 3e-4, ()),
    ("lag", "16", "seq-tis", 1e-4, ()),
    ("fixed noise", "0.2", "none", 3e-4, ()),
    ("fixed noise", "0.4", "none", 3e-4, (2,)),
    ("hidden top-p", "0.9", "none", 3e-4, (1, 2, 3, 4, 5, 6)),
]
K3 = {"exact": 1e-13, "lag": 0.012, "fixed noise": 0.15, "hidden top-p": 1e-13}


def run(mechanism: str, strength: str, method: str, lr: float, seed: int, dies: bool) -> tuple[Row, list[Point]]:
    """One run whose evaluations rise, and halve from a step of its own on if it dies."""
    random = np.random.default_rng([seed, len(mechanism), len(method), int(1e5 * lr), *strength.encode()])
    death = 50 + 10 * (seed % 4) + (20 if lr < 3e-4 else 0)
    steps = list(range(0, STEPS + 1, 10))
    after = [dies and step >= death for step in steps]
    rising = [0.4 + 0.5 * (1 - math.exp(-step / 30 * lr / 3e-4)) for step in steps]
    heights = [value * (0.45 if dead else 1) for value, dead in zip(rising, after, strict=True)]
    accuracy = [value + 0.01 * random.normal() for value in heights]
    result = outcome(steps, accuracy, Endpoints())
    gain = 10 ** (2 * (float(strength or 1) - 4) / 12) if mechanism == "lag" else float(strength or 1) ** 2 * 4
    k3 = K3[mechanism] * gain * math.exp(0.2 * random.normal())
    name = "-".join(filter(None, [mechanism.replace(" ", "-"), strength, method, f"lr{lr:g}"]))
    half = {f"half_{signal}": math.nan for signal in (*SIGNALS, "accuracy")}
    if dies:
        late = {"k3": 0, "ess": 3, "grad_norm": 9, "log_ppl": 6, "length": 14, "reward": 32, "accuracy": 16}
        half = {f"half_{signal}": death - 20 + late[signal] + random.integers(-4, 5) for signal in late}
    row = Row(
        **{"stage": STAGE, "run": name, "seed": seed, "exact": f"exact-none-lr{lr:g}", "mechanism": mechanism},
        **{"strength": strength, "method": method, "control": "none", "lr": lr, "lr_rule": "none"},
        **{"task": "arithmetic", "model": "qwen3", "world": "aaaaaa", "vocabulary": 16, "steps": STEPS},
        **{"answers": 512, "evaluated": "trained"},
        collapsed_at=math.nan if result.collapsed_at is None else result.collapsed_at,
        fell_at=math.nan if result.fell_at is None else result.fell_at,
        **{"relapses": result.relapses, "reason": result.reason, "last_step": STEPS, "final": result.final},
        **{"best": result.best, "k3": k3, "k3_median": k3, "k3_early": k3, "sigma": math.sqrt(2 * k3)},
        **{"mismatch_k3": math.nan, "staleness_k3": math.nan, "length": 7.0, "horizon": 1 / (2 * k3)},
        **{"depth": 14 * k3, "ess": math.exp(-2 * k3), "dropped": 0.0, "grad_norm": 0.3},
        z_surprise=random.normal() - (12 if mechanism.startswith("hidden") else 0),
        **half,
        seconds=60.0,
    )
    points = []
    for step, value, dead in zip(steps, accuracy, after, strict=True):
        rising = 10 ** (min(1.0, max(0.0, (step - death + 30) / 30)) if dies else 0)
        signals = {"k3": k3 * rising, "ess": math.exp(-2 * k3 * rising), "grad_norm": 0.9 if dead else 0.3}
        signals |= {"log_ppl": 0.4, "length": 7.0, "reward": value}
        if step == 0:
            signals = dict.fromkeys(SIGNALS, math.nan)
        points.append(Point(run=name, seed=seed, step=step, accuracy=value, **signals))
    return row, points
