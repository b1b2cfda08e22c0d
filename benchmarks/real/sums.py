"""What the dumps of gap.yaml say about their gap, as sums per prompt for docs/real.md.

    python benchmarks/real/sums.py runs/real/gap          # writes benchmarks/real/results/gap.json
    python benchmarks/real/sums.py runs/real/gap-cuda     # and of a GPU, gap_cuda.json
    python benchmarks/real/sums.py runs/real/sglang       # metrics of a run, run_sglang.csv
    python benchmarks/real/sums.py runs/real/runs         # the ends of the runs of runs.yaml, runs.csv

l = log pi - log mu of a loss token that mu drew, p = pi of it, and eps = logit pi - logit mu:

    k3 = mean(e^l - 1 - l)        sigma^2 = sum(l^2) / sum((1 - p)^2)        ESS_T = (sum w)^2 / (n sum w^2)

with w = exp(sum of l over the first T tokens of a response that has as many). sigma is the noise on every logit that
would give this gap (the token's own logit against all others), and T* = 0.5 / k3 the length from which a sequence
weight has a variance above e - 1.
"""

import itertools
import json
import platform
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rc.analyze.statistics.displacement import CERTAIN, EDGES, log_odds
from megatron_rc.dump.schema import read_dump
from megatron_rc.files import replace_text
from megatron_rc.report.log import read_metrics

Values = np.ndarray[Any, np.dtype[Any]]
RESULTS = Path(__file__).parent / "results"
POSITIONS = (0, 8, 32, 96, 384, 10**6)
LENGTHS = (64, 128, 192, 512, 1024)
SAMPLE = 3000
"""Tokens of a row that are kept for the scatter."""
FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


class Response(dict[str, Any]):
    """One response: its prompt (as text), and [n] fp64 log-probs of trainer and sampler over its loss tokens."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Response":
        kept = np.array(record["loss_mask"], bool)
        pi, mu = (np.array(record[name], np.float64)[kept] for name in ("old_logprobs", "rollout_logprobs"))
        return cls(prompt=tuple(record["prompt_ids"]), pi=pi, mu=mu)


def responses(folder: Path) -> list[Response]:
    return [Response.of(record) for step in read_dump(folder) for record in step]


def row_of(found: list[Response], kinds: dict[tuple[int, ...], str]) -> dict[str, Any]:
    """The sums of one dump."""
    groups = defaultdict[tuple[int, ...], list[Response]](list)
    for one in found:
        groups[one["prompt"]].append(one)
    pi, mu = (np.concatenate([one[name] for one in found]) for name in ("pi", "mu"))
    certain = np.maximum(pi, mu) > CERTAIN
    eps, p = (log_odds(pi) - log_odds(mu))[~certain], np.exp(pi)
    place = np.digitize(p[~certain], EDGES[1:-1])
    position = np.concatenate([np.arange(len(one["pi"])) for one in found])
    chosen = np.random.default_rng(0).permutation(len(pi))[:SAMPLE]
    row: dict[str, Any] = {
        "tokens": len(pi),
        "responses": len(found),
        "equal": float(np.mean(pi.astype(np.float32) == mu.astype(np.float32))),
        "certain": int(certain.sum()),
        "kurtosis": float(np.mean((eps - eps.mean()) ** 4) / eps.var() ** 2),
        "prompts": [{"kind": kinds.get(prompt, ""), **_sums(group)} for prompt, group in groups.items()],
        "positions": [
            _of_tokens(pi[where], mu[where])
            for first, stop in itertools.pairwise(POSITIONS)
            if (where := (position >= first) & (position < stop)).any()
        ],
        "bins": [_of_eps(eps[place == number]) for number in range(len(EDGES) - 1)],
        "sequence weights": {},
        "scatter": [[round(float(a), 4), round(float(b), 4)] for a, b in zip(mu[chosen], pi[chosen], strict=True)],
    }
    for length in LENGTHS:
        sums = np.array([(one["pi"] - one["mu"])[:length].sum() for one in found if len(one["pi"]) >= length])
        if len(sums) >= 20:
            w = np.exp(sums)
            row["sequence weights"][str(length)] = {
                "n": len(sums), "ess": float(w.sum() ** 2 / len(w) / (w**2).sum()),
                "sd": float(sums.std()), "sums": [round(float(x), 4) for x in sums],
            }  # fmt: skip
    return row


def _of_tokens(pi: Values, mu: Values) -> dict[str, float]:
    ratio = pi - mu
    return {
        "tokens": len(pi),
        "k3": float((np.expm1(ratio) - ratio).sum()),
        "l2": float((ratio**2).sum()),
        "free": float((np.expm1(pi) ** 2).sum()),
        "ratio": float(np.exp(ratio).sum()),
    }


def _sums(group: list[Response]) -> dict[str, float]:
    return _of_tokens(*(np.concatenate([one[name] for one in group]) for name in ("pi", "mu")))


def _of_eps(eps: Values) -> dict[str, float]:
    if not len(eps):
        return {"tokens": 0}
    low, high = np.quantile(eps, (0.05, 0.95))
    return {"tokens": len(eps), "mad": float(np.abs(eps).mean()), "q05": float(low), "q95": float(high)}


def figures(prompts: list[dict[str, Any]]) -> dict[str, float]:
    """k3, sigma and the mean ratio of some prompts, from their sums."""
    total = {name: sum(one[name] for one in prompts) for name in ("tokens", "k3", "l2", "free", "ratio")}
    if not total["tokens"]:
        return {"tokens": 0}
    return {
        "tokens": total["tokens"],
        "k3": total["k3"] / total["tokens"],
        "sigma": (total["l2"] / total["free"]) ** 0.5,
        "ratio": total["ratio"] / total["tokens"],
    }


def interval(prompts: list[dict[str, Any]], name: str, draws: int = 2000) -> tuple[float, float]:
    """95 % of the figure over prompts drawn with replacement: tokens of one prompt are not independent."""
    rng = np.random.default_rng(0)
    taken = [figures([prompts[i] for i in rng.integers(len(prompts), size=len(prompts))])[name] for _ in range(draws)]
    low, high = np.quantile(taken, (0.025, 0.975))
    return float(low), float(high)


def machine(cell: Path | None = None) -> dict[str, str]:
    """What of the processor, or of the GPU that a job says it ran on, decides how numbers are rounded."""
    facts = json.loads((cell / "fingerprint.json").read_text()) if cell else {}
    if facts.get("device", "cpu") != "cpu":
        return {"processor": facts["device"], "flags": f"CUDA {facts['cuda']}, torch {facts['torch']}"}
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    return {"processor": (names or [platform.processor()])[0], "flags": " ".join(f for f in FLAGS if f in flags)}


RUN = ("reward/mean", "eval/accuracy", "entropy", "old/k3", "old/ess_seq", "persistence", "grad_norm")
"""Metrics of a run that are kept."""


def of_run(folder: Path) -> str:
    """The CSV of a run: step, then RUN; empty where a step has no such metric."""
    steps = [row for row in read_metrics(folder) if row["phase"] == "rl"]
    lines = [[row["step"], *(f"{row[name]:.4g}" if name in row else "" for name in RUN)] for row in steps]
    return "".join(",".join(map(str, line)) + "\n" for line in [["step", *RUN], *lines])


ENDS = ("reward/mean", "current/k3", "current/ess_seq", "clip_high", "persistence", "entropy", "grad_norm")
"""Metrics of a run of runs.yaml, means of its last 20 steps."""


def of_runs(folder: Path) -> str:
    """The CSV of finished runs: accuracy at the first and of the last two evaluations, then ENDS."""
    lines = [["run", "seed", "processor", "steps", "first accuracy", "accuracy", *ENDS]]
    for cell in sorted(folder.glob("*/seed-*")):
        if not (cell / "report.html").is_file():
            continue  # it runs still
        steps = [row for row in read_metrics(cell) if row["phase"] == "rl"]
        if len(steps) < 2:
            continue  # a warm-up
        accuracy = [row["eval/accuracy"] for row in steps if "eval/accuracy" in row]
        ends = [[row[name] for row in steps[-20:] if name in row] for name in ENDS]
        numbers = [accuracy[0], sum(accuracy[-2:]) / 2, *(sum(each) / len(each) if each else "" for each in ends)]
        head = [cell.parent.name, cell.name.removeprefix("seed-"), machine()["flags"].split()[0], steps[-1]["step"]]
        lines.append([*head, *(f"{number:.4g}" if number != "" else "" for number in numbers)])
    return "".join(",".join(map(str, line)) + "\n" for line in lines)


def main(folder: Path) -> None:
    if (folder / "metrics.jsonl").is_file():
        replace_text(RESULTS / f"run_{folder.name}.csv", of_run(folder))
        return
    if (folder / "warm").is_dir():
        replace_text(RESULTS / "runs.csv", of_runs(folder))
        return
    from megatron_rc.tasks.chat import Chat
    from real.prompts import rows

    out = RESULTS / f"{folder.name.replace('-', '_')}.json"
    found = json.loads(out.read_text()) if out.is_file() else {}
    for cell in sorted(folder.glob("*/seed-*")):
        if len(list((cell / "dump").glob("*.parquet"))) < 2:
            continue  # it runs still
        settings = (cell / "settings.yaml").read_text()
        model = next(line.split()[-1] for line in settings.splitlines() if "hf_path" in line)
        texts = rows()
        kinds = {tuple(ids): row["kind"] for ids, row in zip(Chat(model).encode([r["prompt"] for r in texts]), texts)}  # noqa: B905
        name = f"{cell.parent.name}/{cell.name}"
        found[name] = row_of(responses(cell / "dump"), kinds) | machine(cell)
        if cell.name != "seed-1":
            # one scatter of a choice is enough
            found[name]["scatter"] = []
        print(name, figures(found[name]["prompts"]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    replace_text(out, json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    main(Path(sys.argv[1]))
