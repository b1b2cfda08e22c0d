"""The servers of an engine: connected by url or through a router, picked for requests, taken out of rotation."""

import asyncio
import math
from collections.abc import Sequence

from megatron_rc.rollout.sglang.control import on_every
from megatron_rc.rollout.sglang.http import Background, Server, ServerError
from megatron_rc.versions import SGLANG_WEIGHT_VERSION

_REACH_S = 5.0  # bounds the wait for servers that are likely gone
# not measured; at 1 the least unevenness sends samples to a server without their prompt, at 2 one may do twice its part
_OWN_SHARE = 1.25


class Pool:
    """Connected servers.

    A router's url stands for its workers, which are asked directly: sglang-router 0.3.2 drops the request fields for
    kept ids and routes, cannot abort, pause or update one worker, and repeats failed generations by itself.
    """

    def __init__(self, urls: Sequence[str], *, concurrency: int, timeout_s: float) -> None:
        """Connect to every server.

        Args:
            urls: of servers and routers, such as http://10.0.0.1:30000.
            concurrency: generations in flight, over all servers.
            timeout_s: for each request made here.

        Raises:
            ValueError: a url does not answer as a server or router does.
        """
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls must start with http:// or https://, got {url!r}")
        self._concurrency, self._timeout_s = concurrency, timeout_s
        self.background = Background()
        try:
            self.servers = self.background.run(self._connect([url.rstrip("/") for url in urls]))
        except BaseException:
            self.close()
            raise

    @property
    def rotation(self) -> list[Server]:
        """Servers that take requests."""
        return [server for server in self.servers if server.out is None]

    def require_rotation(self) -> None:
        """Raise ValueError, with the reasons, when no server is left."""
        if not self.rotation:
            reasons = "; ".join(f"{server.url}: {server.out}" for server in self.servers)
            raise ValueError(f"no SGLang server is left in rotation ({reasons})")

    def pick(self, group: int, *, avoid: Server | None = None) -> Server | None:
        """The server for one generation; None if none is in rotation.

        Samples of one prompt go to the same server, which has the prompt in its cache, while its load is below
        _OWN_SHARE times an even share. Servers that failed a moment ago, and ``avoid``, are the last choice.
        """
        rotation, now = self.rotation, asyncio.get_running_loop().time()
        if not rotation:
            return None
        others = [server for server in rotation if server is not avoid] or rotation
        awake = [server for server in others if server.resting_until <= now] or others
        home = awake[group % len(awake)]
        if home.running < math.ceil(_OWN_SHARE * self._concurrency / len(awake)):
            return home
        return min(awake, key=lambda server: server.running)

    def take_versions(self, version: str, *, put_back: bool) -> None:
        """Read every server's weight version; servers with another one, or without an answer, leave the rotation.

        Args:
            put_back: servers that were out of rotation and have this version return.
        """
        served, failures = on_every(self.servers, lambda s: s.get("/model_info", self._timeout_s).get("weight_version"))
        for server in self.servers:
            problem = failures.get(server.url)
            if problem is None and served[server.url] != version:
                problem = f"it serves weights {served[server.url]!r} and not {version!r}"
            if problem is not None:
                server.out = server.out or problem
                continue
            server.syncs += 1
            if put_back:
                server.out = None

    def disown(self) -> None:
        """Rename the weights of servers that are out of rotation, so that no other process samples from them."""
        body, timeout_s = {"new_version": "out-of-rotation", "abort_all_requests": True}, min(self._timeout_s, _REACH_S)
        # failures do not matter: a server that is gone serves nothing
        on_every(
            [server for server in self.servers if server.out is not None],
            lambda s: s.post("/update_weight_version", body, timeout_s),
        )

    def close(self) -> None:
        self.background.close()

    async def _connect(self, urls: Sequence[str]) -> list[Server]:
        try:
            behind = await asyncio.gather(*map(self._workers, urls))
            # a router lists every rank of a data-parallel server, as url@rank
            unique = dict.fromkeys(url.partition("@")[0].rstrip("/") for workers in behind for url in workers)
            return list(await asyncio.gather(*map(self._connected, unique)))
        except ServerError as error:
            raise ValueError(f"cannot use the SGLang server: {error}") from None

    async def _workers(self, url: str) -> list[str]:
        """Urls of the workers behind a router; ``url`` itself when it is a server."""
        try:
            answer = await Server(url, self.background).ask("/workers", None, self._timeout_s)
        except ServerError as error:
            if error.status in (404, 405):
                return [url]
            raise
        workers = answer.get("workers") if isinstance(answer, dict) else None
        if not workers:
            raise ValueError(f"the router {url} has no workers")
        for worker in workers:
            kind = worker.get("worker_type", "regular")
            if kind != "regular" or not worker["url"].startswith(("http://", "https://")):
                raise ValueError(f"worker {worker['url']} of router {url} is of type {kind!r}; only HTTP workers that "
                                 "generate by themselves can be used")  # fmt: skip
        return [worker["url"] for worker in workers]

    async def _connected(self, url: str) -> Server:
        server = Server(url, self.background)
        server.info, server.model = await asyncio.gather(
            server.ask("/server_info", None, self._timeout_s), server.ask("/model_info", None, self._timeout_s)
        )
        if not isinstance(server.info, dict) or "weight_version" not in server.model:
            needed = f"SGLang {SGLANG_WEIGHT_VERSION} or newer is needed"
            raise ValueError(f"{url} does not say its weight version; {needed}")
        return server
