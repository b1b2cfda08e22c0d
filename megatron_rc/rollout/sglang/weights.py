"""The update protocol: a server proves that it has the new weights, or it leaves the rotation."""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rc.rollout.sglang import control
from megatron_rc.rollout.sglang.buckets import cast, server_dtype
from megatron_rc.rollout.sglang.control import on_every
from megatron_rc.rollout.sglang.http import Server
from megatron_rc.rollout.sglang.pool import Pool
from megatron_rc.rollout.sglang.proof import Checksums, Delivery, not_sent, not_taken, odd_ones_out
from megatron_rc.rollout.sglang.transport import Transport
from megatron_rc.settings.sglang import TRANSPORTS, SGLangSettings

T = TypeVar("T")

PROBE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.03}
"""Mean |difference| of the probe's log-probs as a share of their mean size: rounding of logits grows with their size,
and a trained model finds the probe's tokens very unlikely. Wrong tensors change log-probs by about their own size."""

_REACH_SECONDS = 30.0  # as for other requests without tokens; an update itself may take minutes
_GIVE_UP_SECONDS = 5.0  # bounds what a server that failed costs each update
_LAYOUT_FIELDS = ("tp_size", "pp_size", "ep_size", "dp_size", "device", "quantization")
"""Fields of /server_info: servers that agree on them hold their tensors in equal pieces."""


@dataclass
class WeightSync:
    """How the writing process updates the servers, and what it knows about them from the last update."""

    transport: Transport
    hf_config: Mapping[str, Any]
    timeout_s: float = 600.0
    """Longest wait for one call to a server."""
    probe: Callable[[list[int]], list[float]] | None = None
    """The trainer's log-probs of a prompt: log pi(prompt[t] | prompt[:t]) of t >= 1, nats, at temperature 1, by the
    weights just sent. Called once per update, in the writing process alone, after all weights were taken."""
    accepted: Delivery | None = None
    """The last update that any server passed."""
    known: dict[str, tuple[str, Checksums]] = field(default_factory=dict)
    """Version and checksums after the last update that a server passed, by url."""

    def close(self) -> None:
        self.transport.close()


def weight_sync(
    settings: SGLangSettings, hf_config: Mapping[str, Any], probe: Callable[[list[int]], list[float]] | None = None
) -> WeightSync:
    """The transport that ``settings`` name, for servers with this config.json, with nothing sent yet."""
    sender: type[Transport] = pkgutil.resolve_name(f"{__package__}.{TRANSPORTS[settings.weight_sync].sender}")
    return WeightSync(sender(settings, hf_config), hf_config, settings.timeout_s, probe)


def update_servers(pool: Pool, sync: WeightSync, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Bring ``weights`` to all servers and serve them as ``version``.

    Pause, rename the weights to "unproved-<version>", send, flush the cache, compare checksums, rename to
    str(version), read back, continue, probe. A server that fails anywhere stays paused and out of rotation until the
    next update tries it again; answers that it may still give carry a version that is not a number. Only the probe
    runs after the server continued: samples that it returned before the probe failed carry the new version.

    Every tensor is rounded to the servers' dtype once, here. All of ``weights`` are taken whatever happens, because
    other processes take part in making them.

    Args:
        weights: (Hugging Face name, full tensor), one at a time; the same names in every update.

    Raises:
        ValueError: no server is left (the reason of each is given), or the weights differ from those of the first
            update in names or shapes.
    """
    remaining = iter(weights)
    update = _Update(pool, sync, version)
    try:
        update.run(remaining)
    except BaseException as error:
        update.give_up(dict.fromkeys((server.url for server in update.live), f"the update broke off: {error}"))
        raise
    finally:
        for _ in remaining:
            pass


class _Update:
    def __init__(self, pool: Pool, sync: WeightSync, version: int) -> None:
        self.sync, self.version, self.unproved = sync, version, f"unproved-{version}"
        self.live = list(pool.servers)
        self.reasons: dict[str, str] = {}
        self.timeout_s = sync.timeout_s

    def run(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        sync, timeout_s = self.sync, self.timeout_s
        self.drop({s.url: sentence for s in self.live if (sentence := sync.transport.refusal(s.info))})
        # a server that is gone must not be waited for as long as an update may take
        reach_s = min(timeout_s, _REACH_SECONDS)
        versions = self.step("reading its version", lambda s: control.read_version(s, reach_s))
        for server in self.live:
            if sync.known.get(server.url, ("", []))[0] != versions[server.url]:
                server.syncs = 0
        self.step("pausing", lambda s: s.post("/pause_generation", {"mode": "abort"}, timeout_s))
        self.step("naming", lambda s: control.set_version(s, self.unproved, timeout_s))
        dtype = self.common_dtype()
        delivery = Delivery(sync.accepted)
        sessions = {}
        if sync.transport.in_session:
            sessions = self.step("opening the update", lambda s: control.begin_update(s, timeout_s))
        self.drop(sync.transport.send(self.live, cast(weights, dtype, delivery.see), self.version))
        changed = delivery.changed()
        self.step("closing the update", lambda s: sessions.get(s.url) and s.post("/end_weight_update", {}, timeout_s))
        self.step("flushing", lambda s: s.post("/flush_cache", {}, timeout_s))
        held = self.step("computing checksums", lambda s: control.checksums(s, timeout_s))
        self.compare({url: sums for url, sums in held.items() if sums}, versions, set(delivery.shapes), changed)
        self.step("naming", self.name_and_read_back)
        self.step("continuing", lambda s: s.post("/continue_generation", {}, timeout_s))
        self.compare_probe(self.step("probing", self.probe), dtype)
        sync.accepted = delivery
        for server in self.live:
            sync.known[server.url] = (str(self.version), held[server.url] or [])
            server.out = None

    def step(self, doing: str, call: Callable[[Server], T]) -> dict[str, T]:
        results, failures = on_every(self.live, call)
        self.drop({url: f"{doing} failed: {sentence}" for url, sentence in failures.items()})
        return results

    def drop(self, failures: Mapping[str, str]) -> None:
        """Go on without these servers; raise ValueError if none is left."""
        self.give_up(failures)
        if not self.live:
            listed = "; ".join(f"{url}: {sentence}" for url, sentence in self.reasons.items())
            raise ValueError(f"no SGLang server took the weights of version {self.version}: {listed}")

    def give_up(self, failures: Mapping[str, str]) -> None:
        failed = [server for server in self.live if server.url in failures]
        for server in failed:
            self.live.remove(server)
            self.reasons[server.url] = failures[server.url]
            self.sync.known.pop(server.url, None)
            server.out = f"update to version {self.version}: {failures[server.url]}"
        # a probe fails after the server continued under its new name; for a server that is gone, failures do not matter
        give_up_s = min(self.timeout_s, _GIVE_UP_SECONDS)
        on_every(failed, lambda s: s.post("/pause_generation", {"mode": "abort"}, give_up_s))
        on_every(failed, lambda s: control.set_version(s, self.unproved, give_up_s))

    def common_dtype(self) -> torch.dtype:
        dtypes = {server.url: server_dtype(server.info, self.sync.hf_config) for server in self.live}
        if len(set(dtypes.values())) > 1:
            listed = ", ".join(f"{url}: {str(dtype).removeprefix('torch.')}" for url, dtype in dtypes.items())
            raise ValueError(f"all SGLang servers must run with the same --dtype, got {listed}")
        return next(iter(dtypes.values()))

    def compare(
        self, held: Mapping[str, Checksums], versions: Mapping[str, str], names: set[str], changed: set[str]
    ) -> None:
        failures: dict[str, str] = {}
        for server in self.live:
            if server.url not in held or server.info.get("quantization"):
                continue
            sentence = not_sent(names, held[server.url])
            known_version, before = self.sync.known.get(server.url, ("", []))
            # after a restart, or an update by someone else, the earlier checksums are unknown
            if sentence is None and known_version == versions[server.url] and len(before) == len(held[server.url]):
                sentence = not_taken(changed, before, held[server.url])
            if sentence is not None:
                failures[server.url] = sentence
        self.drop(failures)
        by_layout: dict[tuple[str, ...], dict[str, Checksums]] = {}
        for server in self.live:
            if server.url in held:
                layout = tuple(str(server.info.get(field)) for field in _LAYOUT_FIELDS)
                by_layout.setdefault(layout, {})[server.url] = held[server.url]
        self.drop({url: why for group in by_layout.values() for url, why in odd_ones_out(group).items()})

    def name_and_read_back(self, server: Server) -> None:
        control.set_version(server, str(self.version), self.timeout_s)
        version = control.read_version(server, self.timeout_s)
        if version != str(self.version):
            raise ValueError(f"it was named {self.version} and reads back {version!r}")

    def prompt(self) -> list[int]:
        config = self.sync.hf_config
        return control.probe_prompt(config["vocab_size"], config.get("max_position_embeddings", 32))

    def probe(self, server: Server) -> list[float]:
        return control.prompt_logprobs(server, self.prompt(), self.timeout_s)

    def compare_probe(self, logprobs: Mapping[str, list[float]], dtype: torch.dtype) -> None:
        if self.sync.probe is not None:
            expected, whose = self.sync.probe(self.prompt()), "the trainer's"
        else:
            expected, whose = [median(values) for values in zip(*logprobs.values(), strict=True)], "the servers' median"
        failures = {}
        tolerance = PROBE_TOLERANCE[dtype] * fmean(map(abs, expected))
        for url, values in logprobs.items():
            difference = sum(abs(a - b) for a, b in zip(values, expected, strict=True)) / len(expected)
            # not >, so that NaN fails
            if not difference <= tolerance:
                far = f"{difference:.2g} nats from {whose}, above {tolerance:.2g}"
                failures[url] = f"the log-probs of its probe prompt are {far}"
        self.drop(failures)
