"""The results of one checkout, computed in a process of its own: python digest_cases.py torch|triton FILE [AREA ...].

The package and the helper kernel_calls are those that PYTHONPATH names.
"""

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from digest_tree import Results, call, choices, find, kernel_calls, label, product

del sys.path[0]  # kernel_calls, and what it imports, are those of the checkout that is looked at

DTYPES = (torch.float32, torch.bfloat16)
BOUNDS = {
    "ratio": (0.8, 1.2), "k2": (0.01, 0.1), "k3": (0.01, 0.1), "abs_log_ratio": (0.1, 0.5), "prob_diff": (-0.05, 0.1),
    "standardized": (0.1, 1.1), "lag": (1.0, 9.0), "surprise": (-0.5, 0.7),
}  # fmt: skip
"""Lower and upper bound of every statistic: they drop some units of the batch and keep others."""
STANDARDIZED = {"statistic": "standardized", "upper": 1.1}
SHORT, LONG = (7, 0, 5, 9, 1, 12, 6), (1100, 0, 500)
"""Lengths of sequences; a kernel takes the long ones in several chunks."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(
    lengths: tuple[int, ...] = SHORT, dtype: torch.dtype = torch.float32, *, corrupt: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """Arguments of `correct`: log-probs and mask, what else belongs to the batch, what depends on the version.

    Packed, with three rows behind the last sequence.
    """
    generator, n = seeded(len(lengths)), sum(lengths) + 3
    rollout = -3 * torch.rand(n, generator=generator)
    train, sampling = rollout + 0.4 * torch.randn(2, n, generator=generator)
    mask = torch.rand(n, generator=generator) < 0.8
    positions = torch.cat([*map(torch.arange, (*lengths, 3))])
    if corrupt:
        mask[[2, 4, 8, 23, 25, 30]] = True
        # two log-ratios on bounds, which are inclusive, between those that are corrupt or far away
        train[[2, 4, 8, 23, 25, 30]] = torch.tensor([-math.inf, math.log(1.2), math.log(1.3), math.nan, -1.0, -40.0])
        rollout[[4, 8, 25]] = torch.tensor([0.0, 0.0, math.inf])
    options = {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "segment_ids": positions // 4,
        "num_segments": max(lengths) // 4 + 1,
        "advantages": torch.randn(n, generator=generator),
        "statistics": {"surprise": torch.randn(n, generator=generator).round(decimals=1)},
    }
    tokens = {"train_logprobs": train.to(dtype), "rollout_logprobs": rollout.to(dtype), "loss_mask": mask}
    versions = {"lags": (positions * 7 % 20).to(torch.int32), "sampling_logprobs": sampling.to(dtype)}
    return tokens, options, versions


def correct(settings: Any, backend: str, **given: Any) -> Any:
    correction = settings if hasattr(settings, "to_dict") else find("RolloutCorrection").from_dict(settings)
    return call(find("correct"), correction=correction, backend=backend, **given)


def presets(out: Results, backend: str) -> None:
    for name, dtype, lengths in itertools.product(find("PRESETS"), DTYPES, (SHORT, LONG)):
        tokens, options, versions = batch(lengths, dtype)
        for more in [{}, versions] if lengths == SHORT else [{}] * (dtype == torch.float32):
            case = f"presets/{name} {label({'dtype': dtype, 'n': len(lengths), 'versions': bool(more)})}"
            out.case(case, correct, find("RolloutCorrection").preset(name), backend, **tokens, **options, **more)


def weights(out: Results, backend: str) -> None:
    kind, (tokens, options, versions) = find("Weight"), batch()
    for settings in product(
        level=choices(kind, "level"), mode=choices(kind, "mode"), growth=choices(kind, "growth"),
        bounds=[(None, 1.3), (0.8, 1.3), (0.8, None), (None, math.inf), (None, "measured")],
        upper_by_lag=[(), ((0, 1.2), (4, 1.6))], staleness_upper=[None, 1.2],
    ):  # fmt: skip
        case, (lower, upper) = f"weights/{label(settings)}", settings.pop("bounds")
        weight = settings | {"lower": lower, "upper": upper}
        more: dict[str, Any] = {"measured_upper": 1.7} if upper == "measured" else {}
        if settings["staleness_upper"]:
            more |= versions
        if settings["growth"] == "sqrt_lag" or settings["upper_by_lag"]:
            more["lags"] = versions["lags"]
        out.case(case, correct, {"weight": weight}, backend, **tokens, **options, **more)


def rejections(out: Results, backend: str) -> None:
    """One rejection at a time; with Triton, whose interpreter is slow, those of all statistics at once."""
    kind, (tokens, options, versions) = find("Rejection"), batch()
    fields = {name: choices(kind, name, upper=2.0) for name in ("level", "reduce", "when")}
    for settings in product(**fields, sides=[("upper",), ("lower",), ("lower", "upper")]):
        case, sides, gates = f"rejections/{label(settings)}", settings.pop("sides"), list[dict[str, Any]]()
        for statistic, bounds in BOUNDS.items():
            ends = dict(zip(("lower", "upper"), bounds, strict=True))
            gate = {"statistic": statistic, **settings, **{side: ends[side] for side in sides}}
            given = {**tokens, **options, "lags": versions["lags"]}
            if backend == "torch":
                out.case(f"{case} {statistic}", correct, {"reject": [gate]}, backend, **given)
            with contextlib.suppress(ValueError):
                gates += [gate] if kind(**gate) else []
        out.case(case, correct, {"reject": gates}, backend, **given)


def corrections(out: Results, backend: str) -> None:
    """What stands beside weight and rejections, and the padded layout."""
    kind, levels, (tokens, options, _) = find("RolloutCorrection"), choices(find("Weight"), "level"), batch()
    for settings in product(
        level=levels, normalize=choices(kind, "normalize"), log_ratio_bound=[1.0, 20.0], gated=[False, True]
    ):
        case = f"corrections/{label(settings)}"
        settings["weight"] = {"level": settings.pop("level"), "upper": 1.3}
        settings["reject"] = [STANDARDIZED] * settings.pop("gated")
        out.case(case, correct, settings, backend, **tokens, **options)
    for settings in product(old=choices(kind, "old"), normalize=choices(kind, "normalize")):
        out.case(f"corrections/{label(settings)}", correct, settings, backend, **tokens, **options)
    known = torch.tensor(0.07, dtype=torch.float64)
    out.case("corrections/mean_k3", correct, {"reject": [STANDARDIZED]}, backend, **tokens, **options, mean_k3=known)
    padded = {name: value[:24].view(3, 8) for name, value in batch((8, 8, 8), corrupt=False)[0].items()}
    for level, shape in itertools.product(levels, ((3,), (3, 8))):
        settings = {"weight": {"level": level, "upper": 1.3}, "reject": [STANDARDIZED | {"when": "negative_advantage"}]}
        more = {"advantages": torch.randn(shape, generator=seeded(1))}
        out.case(f"corrections/padded {level} {len(shape)}", correct, settings, backend, **padded, **more)


def metrics(out: Results, backend: str) -> None:
    """Sums of a pair of policies, and sums that are merged; those of a correction are with the corrections."""
    for dtype, sequences in itertools.product(DTYPES, (False, True)):
        tokens, options, _ = batch(dtype=dtype)
        more = {"sequences": sequences} | ({"cu_seqlens": options["cu_seqlens"]} if sequences else {})
        out.case(f"metrics/pair {dtype} {sequences}", call, find("pair_metrics"), **tokens, **more, backend=backend)

    def merged() -> Any:
        batches = map(batch, (SHORT, (3, 9, 2, 30)))
        one, two = (correct({}, backend, **tokens, **options).metrics for tokens, options, _ in batches)
        return one.prefixed("old/").merge(two).merge(find("MetricSums")().merge(one))

    out.case("metrics/merged", merged)


def scales(out: Results, backend: str) -> None:
    kind, (tokens, options, _) = find("LossSettings"), batch()
    mask = tokens["loss_mask"]
    kept = mask & (torch.arange(len(mask)) % 3 != 0) & (torch.arange(len(mask)) > 6)
    layouts: dict[str, dict[str, Tensor]] = {
        "packed": {"loss_mask": mask, "kept_mask": kept, "cu_seqlens": options["cu_seqlens"]},
        "padded": {"loss_mask": mask[:40].view(5, 8), "kept_mask": kept[:40].view(5, 8)},
    }
    for settings in product(layout=layouts, **{name: choices(kind, name) for name in ("aggregation", "denominator")}):
        case, tensors = f"scale/{label(settings)}", layouts[settings.pop("layout")]
        more = {"max_length": 12} if settings["aggregation"].endswith("norm") else {}
        out.case(case, call, find("loss_scale"), **tensors, **settings, **more)


def loss_terms(settings: dict[str, Any], tokens: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments that both forms of the loss share, as ``settings`` say."""
    weight = {"level": settings["weight"], "upper": 1.3} if settings["weight"] else None
    given = correct({"weight": weight, "old": settings["old"]}, "torch", **tokens, **options)
    old = None if settings["old"] == "current" else tokens["train_logprobs"].nan_to_num(neginf=-9.0)
    terms = {"old_logprobs": old, "advantages": options["advantages"], "corrected": given}
    terms["scale"] = find("loss_scale")(tokens["loss_mask"], given.mask)
    if settings["kl"]:
        reference = -3 * torch.rand(len(tokens["loss_mask"]), generator=seeded(5))
        terms |= {"reference_logprobs": reference, "kl_coef": 0.2}
    terms |= {"entropy_coef": 0.1} if settings["entropy"] else {}
    return terms | {name: settings[name] for name in ("surrogate", "dual_clip")}


def losses(out: Results, backend: str) -> None:
    for settings in product(
        surrogate=choices(find("LossSettings"), "surrogate"), old=choices(find("RolloutCorrection"), "old"),
        weight=[None, "token"], kl=[False, True], entropy=[False, True], dual_clip=[None, 1.5], dtype=DTYPES,
    ):  # fmt: skip
        out.case(f"loss/{label(settings)}", loss, settings, backend)


def loss(settings: dict[str, Any], backend: str) -> dict[str, Any]:
    tokens, options, _ = batch()
    train = tokens["train_logprobs"].nan_to_num(neginf=-9.0)
    current = train + 0.3 * torch.randn(len(train), generator=seeded(3))
    current[3] = -math.inf
    current = current.to(settings["dtype"]).requires_grad_()
    entropy = torch.rand(len(train), generator=seeded(4)).requires_grad_() if settings["entropy"] else None
    terms = loss_terms(settings, tokens, options)
    answer = call(find("policy_loss"), current_logprobs=current, entropy=entropy, backend=backend, **terms)
    (answer.loss * 1.7).backward()
    return {"answer": answer, "gradient": current.grad, "entropy gradient": None if entropy is None else entropy.grad}


def rows(settings: dict[str, Any], n: int, width: int) -> dict[str, Any]:
    """Arguments that the log-probs of logits and those of the head share."""
    generator = seeded(n)
    targets = torch.randint(width - 5, (n,), generator=generator)
    arguments: dict[str, Any] = {"targets": targets, "vocab_size": width - 5, "with_entropy": settings["entropy"]}
    if settings["support"]:
        ids = torch.stack([torch.randperm(width - 5, generator=generator)[:9] for _ in range(n)])
        ids[::2, 3] = torch.where((ids == targets[:, None]).any(1), ids[:, 3], targets)[::2]
        arguments["support"] = find("Support")(ids.flatten(), torch.arange(n + 1) * 9)
    if not settings["per_row"]:
        return arguments | {"temperature": 0.8}
    return arguments | {"temperature": torch.rand(n, generator=generator) + 0.5, "mask": torch.arange(n) % 4 != 1}


def with_gradients(answer: Any, *leaves: Tensor) -> dict[str, Any]:
    """An answer of log-probs, and the gradients of its sum with random factors."""
    parts = answer if isinstance(answer, tuple) else (answer,)
    finite = [torch.where(part.isfinite(), part, 0) for part in parts]
    total = sum((part * torch.rand(part.shape, generator=seeded(i))).sum() for i, part in enumerate(finite))
    assert isinstance(total, Tensor)
    total.backward()
    return {"answer": answer, "gradients": [leaf.grad for leaf in leaves]}


ROWS = {name: [False, True] for name in ("entropy", "support", "per_row")}


def logits(out: Results, backend: str) -> None:
    def logprobs(settings: dict[str, Any], width: int) -> dict[str, Any]:
        leaf = (2 * torch.randn(6, width, generator=seeded(1))).to(settings["dtype"]).requires_grad_()
        more = {"inplace_backward": settings["inplace"], "backend": backend, **rows(settings, 6, width)}
        return with_gradients(call(find("vocab_parallel_logprobs"), logits=leaf * 1, **more), leaf)

    for settings in product(dtype=DTYPES, inplace=[False, True], **ROWS):
        for width in [90] if settings["inplace"] else [90, 33_000]:
            out.case(f"logits/{width} {label(settings)}", logprobs, settings, width)
    given = rows({"entropy": None, "support": True, "per_row": True}, 6, 90)
    given |= {"logits": torch.randn(6, 90, generator=seeded(2)), "with_kept_mass": True, "with_varentropy": True}
    given.pop("with_entropy")
    out.case("logits/distribution", call, find("vocab_parallel_distribution"), **given, backend=backend)


def heads(out: Results, backend: str) -> None:
    of_head = {"rows": [False, True], "chunk": [None, 5][backend == "triton" :], "logits_dtype": [None, torch.float32]}
    for settings in product(dtype=DTYPES, **ROWS, **of_head):
        out.case(f"head/{label(settings)}", head, settings, backend)
        for more in product(surrogate=choices(find("LossSettings"), "surrogate"), upstream=[None, 3.0]):
            out.case(f"head loss/{label(settings | more)}", head, settings | more, backend)


def head(settings: dict[str, Any], backend: str) -> dict[str, Any]:
    tokens, options, _ = batch((6, 0, 5), corrupt=False)
    n, width = len(tokens["loss_mask"]), 70
    both = torch.randn(n + width, 16, generator=seeded(7)).to(settings["dtype"]).split([n, width])
    hidden, weight = (part.clone().requires_grad_() for part in both)
    given = {"hidden": hidden, "weight": weight, "backend": backend, **rows(settings, n, width)}
    given |= {name: settings[name] for name in ("chunk", "logits_dtype")}
    if settings["rows"]:
        given["rows"] = tokens["loss_mask"].nonzero().flatten()
    if "surrogate" not in settings:
        return with_gradients(call(find("linear_logprobs"), **given), hidden, weight)
    if settings["upstream"]:
        given["upstream"] = settings["upstream"]
        weight.main_grad = torch.full((width, 16), 0.25)  # type: ignore[attr-defined]
    terms = {"weight": "sequence", "old": "recompute", "kl": settings["support"], "dual_clip": None, **settings}
    answer = call(find("linear_policy_loss"), **given, **loss_terms(terms, tokens, options))
    (answer.loss * 3.0).backward()
    return {"answer": answer, "gradients": [hidden.grad, weight.grad, getattr(weight, "main_grad", None)]}


def advantages(out: Results, backend: str) -> None:
    rewards = torch.rand(24, generator=seeded(1)).round(decimals=1)
    rewards[3], rewards[8:12] = math.nan, 0.3
    groups = {"blocks": torch.arange(24) // 4, "mixed": torch.randint(9, (24,), generator=seeded(2))}
    for where, number in groups.items():
        for name in ("rloo_advantages", "grpo_advantages", "equal_reward_groups"):
            out.case(f"advantages/{name} {where}", find(name), rewards, number)
        out.case(f"advantages/centred {where}", find("grpo_advantages"), rewards, number, divide_by_std=False)
    out.case("advantages/of tokens", find("expand_to_tokens"), rewards[:3], torch.tensor([2, 2, 9, 30]), 33)


def learning_rates(out: Results, backend: str) -> None:
    noise = torch.rand(120, generator=seeded(1)).tolist()

    def curve(value: Callable[[float], float], surge: int = 999) -> list[float | None]:
        """A number per rollout, four times as large from ``surge`` on; one is missing, and one is NaN."""
        missing = {10: None, 11: math.nan}
        return [missing.get(t, value(x) * (4 if t >= surge else 1)) for t, x in enumerate(noise)]

    lengths = {surge: curve(lambda x: 90 + 20 * x, surge) for surge in (6, 40, 999)}
    signals = {"ess": curve(float), "k3": curve(float), "grad_cosine": curve(float), "length": lengths[40]}
    kind, rate = find("LRGate"), {"initial_lr": 1e-3}
    for settings in product(signal=signals, rule=choices(kind, "rule", **rate), patience=[1, 3]):
        given = settings | rate | {"target": 200.0 if settings["signal"] == "length" else 0.4}
        out.case(f"learning rate/{label(settings)}", followed, kind, given, "step", [signals[settings["signal"]]])
    constants: list[dict[str, Any]] = [{}, {"warmup": 0}, {"fast": 0.3, "threshold": 1.3, "patience": 1}]
    cut = [None if t < 50 else 0.9 * x for t, x in enumerate(noise)]
    for surge, shares, (number, given) in itertools.product(lengths, ([None] * 120, cut), enumerate(constants)):
        steps, case = [lengths[surge], shares], f"surge={surge} cut={shares is cut} constants={number}"
        out.case(f"surge/{case}", followed, find("SurgeDetector"), given, "update", steps)
        for period in product(decay_period=[None, 7], period_per_surge=[0.3, 1.8]):
            more = rate | {"detector": find("SurgeDetector")(**given)}
            name = f"learning rate/{case} {label(period)}"
            out.case(name, followed, find("LengthDecayLR"), period | more, "step", steps)


def followed(kind: Any, given: dict[str, Any], step: str, series: list[list[Any]]) -> dict[str, Tensor]:
    """What a rule says after every rollout, NaN for nothing; half way, another object takes its state over."""
    rule, said = call(kind, **given), list[dict[str, Any]]()
    for number, values in enumerate(zip(*series, strict=True)):
        if number == len(series[0]) // 2:
            state, rule = json.dumps(rule.state_dict()), call(kind, **given)
            rule.load_state_dict(json.loads(state))
        names = ("lr", "scale", "alarm", "ratio", "surge_step", "surge_in_warmup", "withdrawn", "rollouts", "measured")
        numbers = {"returned": getattr(rule, step)(*values)} | {name: getattr(rule, name, None) for name in names}
        metrics = rule.metrics() if hasattr(rule, "metrics") else {}
        said.append(numbers | {f"metric {name.rpartition('/')[2]}": value for name, value in metrics.items()})
    lists = {name: [numbers.get(name) for numbers in said] for name in dict.fromkeys(itertools.chain(*said))}
    return {
        name: torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
        for name, values in lists.items()
    }


WITHOUT_BACKEND = (scales, advantages, learning_rates)
AREAS = (presets, weights, rejections, corrections, metrics, losses, logits, heads, kernel_calls)


def main(backend: str, path: str, *only: str) -> None:
    import megatron_rc

    out, interpreter = Results(), contextlib.nullcontext()
    torch.set_num_threads(1)
    if backend == "triton":
        torch.use_deterministic_algorithms(True)  # fills what is allocated: a kernel may leave rows as they are
        with contextlib.suppress(ImportError):
            from speed.fast_interpreter import interpreter_that_remembers

            interpreter = interpreter_that_remembers()
    with interpreter:
        for area in (*AREAS, *WITHOUT_BACKEND) if backend == "torch" else AREAS:
            if not only or area.__name__ in only:
                area(out, backend)
                print(f"{backend}: {area.__name__}, {len(out)} results, {time.process_time():.0f} s", file=sys.stderr)
    Path(path).write_text(json.dumps({"package": str(Path(megatron_rc.__file__).resolve()), "results": out}))


if __name__ == "__main__":
    main(*sys.argv[1:])
