"""The noise that a server and the trainer have against themselves, in a file for `megatron-rc analyze --floor`."""

import json
import math
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.statistics.noise import Noise
from megatron_rc.doctor.registry import Check, Finding, Undecided, good
from megatron_rc.doctor.server.facts import ServerFacts
from megatron_rc.doctor.server.probes import BROKEN_K3, PROBES, Probes
from megatron_rc.doctor.server.scores import Scores, k3
from megatron_rc.files import replace_text


def noise_floor(scores: Scores) -> dict[str, float]:
    """The noise of a logit in each self-shift; the floor of both sides together under "noise"; the "gap" between them.

    noise(a, b) = median(|b - a| / (1 - e^a)) / 0.6745    over the tokens with 1 - e^a > 0.01, temperature 1
    server      = max(noise(alone, decode), noise(alone, together))
    trainer     = noise(trainer, trainer_together)
    floor       = sqrt(server^2 + trainer^2)              sqrt(2) times what independent rounding makes of a gap

    Raises Undecided where a self-shift is as large as a fault, or too few tokens tell it.
    """
    pairs = {"server_decode": (scores.alone, scores.decode), "server_batch": (scores.alone, scores.together)}
    pairs |= {"trainer_batch": (scores.trainer, scores.trainer_together), "gap": (scores.trainer, scores.decode)}
    found = {name: Noise(Chunk(a, b, np.array([0, a.size]))).typical for name, (a, b) in pairs.items()}
    for name, (a, b) in pairs.items():
        if math.isnan(found[name]) or (name != "gap" and k3(a - b) > BROKEN_K3):
            raise Undecided(f"{name} is k3 {k3(a - b):.1e}: a fault, or too few tokens of which the model is uncertain")
    return {"noise": math.hypot(max(found["server_decode"], found["server_batch"]), found["trainer_batch"]), **found}


class Floors(dict[str, dict[str, Any]]):
    """The floor of each probed server by its URL, empty where none could be measured."""

    def checks(self, served: ServerFacts) -> Probes:
        """The probes, and a check that keeps the floor of this server."""
        self[served.url] = {}
        checks = Probes(PROBES.subject, PROBES)
        checks.add(Check("noise-floor", "Log-probs of each side against its own", partial(self._keep, served)))
        return checks

    def _keep(self, served: ServerFacts, scores: Scores) -> Finding:
        found = noise_floor(scores)
        noise, gap = found.pop("noise"), found.pop("gap")
        model = Path(str(served.model_info.get("model_path"))).name  # not where it lies on a machine
        versions = {"sglang": served.server_info.get("version"), "weights": served.model_info.get("weight_version")}
        measured = {"noise": noise, "gap": gap, "parts": found, "tokens": scores.decode.size}
        self[served.url] = {**measured, "server": served.url, "model": model, **versions}
        listed = ", ".join(f"{name} {part:.1e}" for name, part in found.items())
        return good(f"a logit has a noise of {noise:.1e} against its own side ({listed}), {gap:.1e} against the other")

    def write(self, path: Path) -> str:
        """Write the largest floor and those of all servers, and return a line that says so; ValueError without one."""
        if missing := [url for url, floor in self.items() if not floor]:
            raise ValueError(f"--floor: {path} is not written: {missing[0]} has no floor, its findings say why")
        servers = sorted(self.values(), key=lambda floor: floor["noise"], reverse=True)
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        replace_text(path, json.dumps({**servers[0], "made_at": made_at, "servers": servers}, indent=2) + "\n")
        return f"The floor {servers[0]['noise']:.1e} is in {path}: megatron-rc analyze DUMP --floor {path}"
