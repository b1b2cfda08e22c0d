"""Every trap: how its dump is made, and what an analysis must answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from diagnosis.traps.dumps import with_columns
from diagnosis.traps.faults import late_by_one, misconverted, penalised, rounded
from diagnosis.traps.lab import NEWEST, SERVERS, Lab
from diagnosis.traps.language import END, TOPIC_IDS, TOPICS
from diagnosis.traps.models import VERSIONS, build
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.engine import HiddenSampling, Sample


class Trap(NamedTuple):
    kind: Literal["real engine", "real server", "injected"]
    """real engine: the embedded engine runs with the fault. real server: an SGLang server does. injected: the logs of a
    healthy dump are changed."""
    answer: str
    """Code of the rule that must answer."""
    level: str
    """Level of its verdict."""
    make: Callable[[Lab], Chunk] | None = None
    """None: a server makes it together with others."""


def hidden(**settings: float) -> Callable[[Lab], Chunk]:
    return lambda lab: lab.dump(lab.sample(hidden=HiddenSampling(**settings)))


def logged(**settings: float) -> Callable[[Lab], Chunk]:
    """The sampler draws with these settings and logs what it did; the trainer knows nothing of them."""
    return lambda lab: lab.dump(lab.sample(**settings))


def raw_logs(lab: Lab, temperature: float) -> Chunk:
    """Sampled and trained at a temperature, logged without it."""
    samples = lab.sample(hidden=HiddenSampling(temperature=temperature))
    return lab.dump(samples, temperature=temperature)


def with_weights(change: Callable[[dict], dict]) -> Callable[[Lab], Chunk]:
    return lambda lab: lab.dump(lab.sample(weights=change(lab.dense.versions[NEWEST])))


def other_prompt(lab: Lab) -> Chunk:
    """Another template wrote the prompts: they name another topic."""
    others = [[TOPIC_IDS + (prompt[0] - TOPIC_IDS + 5) % TOPICS, *prompt[1:]] for prompt in lab.prompts]
    samples = lab.sample(prompts=others)
    own = [prompt for prompt in lab.prompts for _ in range(len(samples) // len(lab.prompts))]
    return lab.dump(samples, prompts=own)


def one_stale_server(lab: Lab) -> Chunk:
    """One of the servers kept its first weights."""
    fresh, old = lab.healthy, lab.sample(weights=lab.dense.versions[0])
    return lab.dump([o if i % SERVERS.size == 2 else f for i, (f, o) in enumerate(zip(fresh, old, strict=True))])


def policy_lag(lab: Lab) -> Chunk:
    """Every response has weights that are up to four updates old, as its columns say."""
    by_version = [lab.sample(weights=weights) for weights in lab.dense.versions]
    versions = np.arange(len(lab.healthy)) // 2 % VERSIONS
    planted = lab.dump([by_version[version][i] for i, version in enumerate(versions)])
    own = np.repeat(versions, planted.lengths)
    return with_columns(planted, version=own, trainer_version=np.full(versions.size, VERSIONS - 1))


def expert_flips(lab: Lab) -> Chunk:
    samples = lab.sample(model=lab.moe, routes=True)
    return lab.dump(samples, model=build(lab.moe.config, lab.moe.versions[NEWEST]))


def zero_filled(lab: Lab) -> Chunk:
    """Every eighth response has 0.0 instead of its log-probs."""
    planted = lab.healthy_dump
    empty = np.repeat(np.arange(planted.lengths.size) % 8 == 3, planted.lengths)
    return replace(planted, log_mu=np.where(empty, np.float32(0), planted.log_mu))


def forced_end(lab: Lab) -> Chunk:
    """The host ended every response that reached its limit with an id of its own, logged as 0.0."""

    def ended(s: Sample) -> Sample:
        return replace(s, output_ids=[*s.output_ids[:-1], END], logprobs=[*s.logprobs[:-1], 0.0])

    return lab.dump([ended(s) if s.finish_reason == "length" else s for s in lab.healthy])


TRAPS: dict[str, Trap] = {
    "healthy, bf16": Trap("real engine", "RC501", "numerics", lambda lab: lab.healthy_dump),
    "healthy, int8 weights": Trap("real engine", "RC501", "numerics", with_weights(lambda w: rounded(w, "int8"))),
    "healthy, fp8 weights": Trap("real engine", "RC501", "numerics", with_weights(lambda w: rounded(w, "fp8"))),
    "policy lag": Trap("real engine", "RC502", "lag", policy_lag),
    "expert flips": Trap("real engine", "RC404", "numerics", expert_flips),
    "logged temperature 0.9": Trap("real engine", "RC101", "BUG", logged(temperature=0.9)),
    "logged temperature 0.98": Trap("real engine", "RC101", "BUG", logged(temperature=0.98)),
    "renormalised top-p 0.95": Trap("real engine", "RC102", "BUG", logged(top_p=0.95)),
    "renormalised top-p 0.99": Trap("real engine", "RC102", "BUG", logged(top_p=0.99)),
    "hidden temperature 0.9": Trap("real engine", "RC103", "BUG", hidden(temperature=0.9)),
    "hidden temperature 0.95": Trap("real engine", "RC103", "BUG", hidden(temperature=0.95)),
    "hidden top-p 0.95": Trap("real engine", "RC103", "BUG", hidden(top_p=0.95)),
    "hidden top-p 0.99": Trap("real engine", "RC103", "BUG", hidden(top_p=0.99)),
    "hidden presence penalty": Trap(
        "real engine", "RC103", "BUG", lambda lab: lab.dump(lab.sample(draw=penalised(1.0)))
    ),
    "raw logs at temperature 0.8": Trap("real engine", "RC104", "BUG", lambda lab: raw_logs(lab, 0.8)),
    "raw logs at temperature 0.95": Trap("real engine", "RC104", "BUG", lambda lab: raw_logs(lab, 0.95)),
    "padded vocabulary": Trap("real engine", "RC106", "BUG", lambda lab: lab.dump(lab.healthy, padding=128)),
    "shifted by one": Trap("injected", "RC201", "BUG", lambda lab: late_by_one(lab.healthy_dump)),
    "zero-filled": Trap("injected", "RC203", "BUG", zero_filled),
    "forced end": Trap("injected", "RC203", "BUG", forced_end),
    "another template": Trap("real engine", "RC205", "BUG", other_prompt),
    "one stale server": Trap("real engine", "RC303", "BUG", one_stale_server),
    "wrong conversion of one tensor": Trap("real engine", "RC501", "numerics", with_weights(misconverted)),
}
"""Every trap that needs no server, by its name."""
