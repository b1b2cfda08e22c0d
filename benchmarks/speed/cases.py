"""The table of cases: what is called at which size, how near to fp64 it must be, what it moves and should reach."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from speed import head, rows, tokens
from speed.meter import Call, Figures, Meter
from speed.peers import OURS, Peers
from speed.tokens import Shape

PEER_TOLERANCE = {"logprobs": 1e-2, "entropy": 1e-2, "gradient": 2e-2}
"""A peer counts when it answers right for its purpose, however it rounds."""
HEAD_TOLERANCE = {"loss": 1e-2, "hidden gradient": 2e-2, "weight gradient": 2e-2}
UNUSUAL = {
    "temperature 0.7": (Shape(8192, 151_936, temperature=0.7), Shape(5, 256, temperature=0.7)),
    "40 % masked": (Shape(8192, 151_936, masked=0.4), Shape(5, 256, masked=0.4)),
    # a multiple of 8 and not of 16: rows that start at 16 bytes, at strides for which Triton does not specialise
    "16 bytes times an odd number": (Shape(65_536, 151_936, tp=16), Shape(5, 264)),
    "odd addresses": (Shape(8192, 50_257), Shape(5, 257)),
    "many short rows": (Shape(2**20, 1024), Shape(12, 32)),
}
"""Rows, and the same at toy size."""
_H200_MS: dict[str, dict[str, float]] = {
    "8,192 x 151,936 of 4,096 (TP 1)": {OURS: 49, head.WIDE: 46, head.ANY_LOSS: 60, "old pass": 14.8},
    "8,192 x 18,992 of 4,096 (TP 8)": {OURS: 6.2, head.ANY_LOSS: 8, "old pass": 2},
    "8,192 x 151,936 of 4,096 (TP 1), 50 % masked": {OURS: 25},
    "32,768 x 151,936 of 4,096 (TP 1)": {head.WIDE: 182, head.ANY_LOSS: 236, "old pass": 58},
}


class Target(NamedTuple):
    figure: str
    """The name of a figure of speed.report.FIGURES."""
    bound: float
    provider: str = OURS


class Case(NamedTuple):
    name: str
    build: Callable[[Meter], dict[str, Call]]
    tolerance: Figures
    facts: dict[str, Any]
    """tokens; columns and tp of logits; the bytes that ours move per phase, the FLOP of products."""
    targets: tuple[Target, ...] = ()


def cases(peers: Peers, *, toy: bool) -> list[Case]:
    """The short ones first, then heads, log-probs, what is unusual about rows, and the log-probs of most rows."""
    # where a GPU rounds to bf16 the interpreter cuts, by up to one unit in the last place
    near = {"logprobs": 1e-4, "entropy": 1e-4, "loss": 1e-4}
    near |= {"gradient": 2.0**-7} if toy else {"gradient_over_rounding": 1.5}
    whole, n = (Shape(8, 1024), 4096) if toy else (Shape(8192, 151_936), 65_536)
    found = [_correction(*sizes) for sizes in ([(n, 1024)] if toy else [(n, 1024), (2**20, 1024), (1_048_400, 200)])]
    facts: dict[str, Any] = {"tokens": n, "bytes": {"forward": 33 * n, "backward": 16 * n}}
    bounds, wanted = {"loss": 1e-4, "gradient": 1e-4}, (Target("launches", 3),)
    found.append(Case(f"policy_loss, {n:,} tokens", partial(tokens.loss, n), bounds, facts, wanted))
    n, layers, k = (192, 5, 4) if toy else (65_536, 48, 8)
    facts = {"tokens": n, "bytes": {"call": n * (4 * layers * k + 9)}}
    build: Callable[[Meter], dict[str, Call]] = partial(tokens.routes, n, layers, k)
    found.append(Case(f"compare_routes, {n:,} x {layers} x {k}", build, {"numbers that differ": 0}, facts))
    for most in (3, 6) if toy else (20, 128):
        ids = sum(1 + index % most for index in range(whole.tokens))
        facts = {"bytes": {"both": 104 * whole.tokens + 34 * ids}}
        build = partial(rows.kept_ids, whole, most)
        found.append(Case(f"kept ids, up to {most}, {whole.size}", build, near, _facts(whole) | facts))
    build, wanted = partial(rows.update, whole), (Target("launches", 5),)
    found.append(Case(f"update path, {whole.size}", build, near, _facts(whole), wanted))
    found += _heads(peers, toy)
    times = (1,) if toy else (1, 2, 8)
    shapes = [whole._replace(tp=tp, tokens=n * whole.tokens) for n in times for tp in (1, 2, 8)]
    found += [_logprobs(shape, entropy, peers, near) for shape in shapes for entropy in (False, True)]
    for what, (full, small) in UNUSUAL.items():
        case = _logprobs(small if toy else full, False, peers, near)
        found.append(case._replace(name=f"{what}: {case.name}", targets=()))
    # what takes longest comes last
    return sorted(found, key=lambda case: case.facts["tokens"] == 8 * whole.tokens and "columns" in case.facts)


def _facts(shape: Shape) -> dict[str, Any]:
    return {"tokens": shape.tokens, "columns": shape.columns, "tp": shape.tp}


def _correction(n: int, length: int) -> Case:
    targets = [Target("launches", 4)]
    if n == 65_536:
        targets += [Target("graph µs", 20), Target("host µs", 150), Target("recipe's wall time / ours", 10)]
    # fp32 sums of a million terms, one statement per metric, are the recipe's own error
    bounds, facts = {"weights": 1e-4, "masks that differ": 0, "metrics": 2e-3}, {"tokens": n, "bytes": {"call": 23 * n}}
    name = f"correct, {n:,} tokens{f' in sequences of {length}' if length != 1024 else ''}"
    return Case(name, partial(tokens.correction, n, length), bounds, facts, tuple(targets))


def _logprobs(shape: Shape, entropy: bool, peers: Peers, near: Figures) -> Case:
    # a row of a shard is short: its epilogue and the last wave weigh more
    read, copied = (0.90, 0.92) if shape.tp == 1 else (0.75, 0.85)
    targets = [Target("share of reading", read), Target("share of copying", copied)]
    if shape.tp == 1:
        # two passes move 6 at least; one pass would move 4, but a row would have to stay in the L2 cache
        targets.append(Target("bytes per logit", 6.6))
    targets.append(Target("extra bytes per token", 32) if entropy else Target("best peer's time / ours", 1.0))
    facts = _facts(shape) | {"bytes": shape.bytes(entropy), "rows": shape.tokens - shape.left_out}
    build = partial(rows.logprobs, shape, entropy, peers)
    return Case(f"log-probs{', entropy' * entropy}: {shape.size}", build, near, facts, tuple(targets))


def _heads(peers: Peers, toy: bool) -> list[Case]:
    """6 N H V operations for a loss and its gradients, 2 for log-probs; targets are of an H200."""
    one = Shape(24, 256, hidden=8) if toy else Shape(8192, 151_936, hidden=4096)
    shapes = [one, one._replace(tp=8), one._replace(masked=0.5), one._replace(tokens=4 * one.tokens)]
    found, silent = [], []
    for shape in shapes[: 3 if toy else 4]:
        size, flop = f"{shape.size}{', 50 % masked' if shape.masked else ''}", shape.hidden * shape.columns
        flop *= 2 * (shape.tokens - shape.left_out)
        most = dict(_H200_MS.get(size, {}))
        late = tuple(Target("ms", most.pop(name)) for name in ("old pass",) if name in most)
        targets = [Target("ms", bound, name) for name, bound in most.items()]
        if shape.tp == 8:
            targets.append(Target("MB beyond its inputs", 230))
        if shape.tokens > one.tokens:
            targets += [Target("MB beyond its inputs", 1520, head.WIDE), Target("memory / that of logits", 1 / 7)]
        facts = _facts(shape) | {"flop": 3 * flop}
        found.append(Case(f"head, {size}", partial(head.policy, shape), HEAD_TOLERANCE, facts, tuple(targets)))
        facts = _facts(shape) | {"flop": flop}
        silent.append(Case(f"old pass, {size}", partial(head.old_pass, shape), {"log-probs": 1e-2}, facts, late))
    build = partial(head.cross_entropy, one, peers)
    return [*found, *silent, Case(f"cross entropy, {one.size}", build, HEAD_TOLERANCE, _facts(one))]
