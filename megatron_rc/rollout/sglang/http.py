"""HTTP to SGLang servers: one event loop in a thread of its own, for code in that loop and for blocking code."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from megatron_rc.versions import installing

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_TICK_S = 0.1  # how often the waiting thread calls `tick`, and can be interrupted
_CLEAN_UP_S = 5.0  # after an error, a job waits at most this long for servers to take the order to abort
_LONGEST_PAUSE_S = 30.0  # so that a server that restarted is found again within half a minute
_KEEP_ALIVE_S = 2.0
"""Servers drop connections that are idle for 5 s, and a request that is on its way then fails."""
_LARGE_BODY = 1 << 20  # aiohttp writes longer bytes at once, warns, and blocks every other request
_HEADERS = {"Content-Type": "application/json"}


class ServerError(Exception):
    """A request that got no answer, or an error; the sentence never holds tokens or text of a prompt."""

    def __init__(
        self,
        status: int | None,
        sentence: str,
        *,
        reason: Literal["server_error", "timeout", "bad_answer"] = "server_error",
        connected: bool = True,
    ) -> None:
        """``status`` of HTTP, None without an answer; ``connected`` is False when the server cannot have seen it."""
        super().__init__(sentence)
        self.status, self.reason, self.connected = status, reason, connected

    @property
    def is_transient(self) -> bool:
        """Worth retrying, here or on another server."""
        return self.status is None or self.status in (200, 408, 429) or self.status >= 500


class Background:
    """An event loop in a thread, with an HTTP session; ``close`` ends both."""

    def __init__(self) -> None:
        try:
            import aiohttp  # noqa: F401 - fails here if it is missing, before a thread starts
        except ModuleNotFoundError:
            raise ValueError(f"SGLang servers need aiohttp: {installing('sglang')}") from None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-http", daemon=True)
        self._thread.start()
        self.session: aiohttp.ClientSession = self.run(_open_session())

    def run(self, work: Coroutine[Any, Any, T], tick: Callable[[], None] | None = None) -> T:
        """Run ``work`` in the loop and wait for it in this thread; an exception while waiting cancels it.

        Args:
            tick: called in this thread ten times per second, and once after the end.
        """
        ended, tasks = threading.Event(), list[asyncio.Task[T]]()

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set())

        if self._loop.is_closed():
            work.close()
            raise ValueError("the engine is closed")
        self._loop.call_soon_threadsafe(start)
        try:
            while not ended.wait(_TICK_S):
                if tick is not None:
                    tick()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait(_CLEAN_UP_S)
            raise
        if tick is not None:
            tick()
        return tasks[0].result()

    def soon(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the loop, without waiting for it."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.run(_end_all_tasks(self.session))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all_tasks(session: aiohttp.ClientSession) -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await session.close()


async def _open_session() -> aiohttp.ClientSession:
    import aiohttp

    return aiohttp.ClientSession(
        # the engine bounds the requests in flight; control requests must not queue behind them
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        headers=_HEADERS,
    )


class Server:
    """One SGLang server."""

    def __init__(self, url: str, background: Background) -> None:
        self.url = url
        self.info: dict[str, Any] = {}
        """Answer of /server_info at the time of connection."""
        self.model: dict[str, Any] = {}
        """Answer of /model_info at that time."""
        self.out: str | None = None
        """One sentence on why it is out of rotation; None while it is in."""
        self.running = 0
        """Generations without an answer."""
        self.syncs = 0
        """Weight updates that it took since this process connected to it, or since its weights were unknown."""
        self.failures = 0
        """Consecutive ones; failures of requests that were in flight together count as one."""
        self.resting_until = 0.0
        """Until this time of the loop, other servers are preferred."""
        self._background = background

    @property
    def name(self) -> str:
        """The address, without a user name and password."""
        return self.url.partition("://")[2].rpartition("@")[2]

    def failed(self, now: float, pause_s: float) -> None:
        """Prefer other servers for ``pause_s``, twice as long after every further failure."""
        if now >= self.resting_until:
            self.resting_until = now + doubled(pause_s, self.failures)
            self.failures += 1

    def answered(self) -> None:
        self.failures, self.resting_until = 0, 0.0

    def get(self, path: str, timeout_s: float) -> Any:
        """The answer, for blocking code.

        Raises:
            ServerError: there was no answer in time, or a lost connection, a status of 400 or more, or broken JSON.
        """
        return self._background.run(self.ask(path, None, timeout_s))

    def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """The answer to ``body`` sent as JSON; otherwise as ``get``."""
        return self._background.run(self.ask(path, json.dumps(body).encode(), timeout_s))

    def generate(self, bodies: Sequence[Any], timeout_s: float) -> list[Any]:
        """The answers of /generate to requests sent at the same time, each once more where the connection was lost.

        A server that is short of processor time may close an idle connection just after a request was written to it.
        """

        async def all_answers() -> list[Any]:
            return await asyncio.gather(*(answer(json.dumps(body).encode()) for body in bodies))

        async def answer(text: bytes) -> Any:
            try:
                return await self.ask("/generate", text, timeout_s)
            except ServerError as error:
                if error.status is not None or error.reason == "timeout":
                    raise
            return await self.ask("/generate", text, timeout_s)

        return self._background.run(all_answers())

    async def ask(self, path: str, body: bytes | None, timeout_s: float | None) -> Any:
        """The answer, for code in the loop: decoded JSON, or text if the server says that it is text.

        Args:
            body: JSON of a POST; None: GET.
            timeout_s: until the last byte of the answer; None: without limit.

        Raises:
            ServerError: as in ``get``.
        """
        import aiohttp

        data: Any = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY else body
        method = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._background.session.request(method, self.url + path, data=data) as answer,
            ):
                content = await answer.read()
        except TimeoutError:
            sentence = f"{self.url}{path} did not answer within {timeout_s:g} s"
            raise ServerError(None, sentence, reason="timeout") from None
        except aiohttp.ClientConnectorError:
            raise ServerError(None, f"{self.url} refuses connections", connected=False) from None
        except (aiohttp.ClientError, OSError) as error:
            sentence = f"{self.url}{path} lost the connection ({type(error).__name__})"
            raise ServerError(None, sentence) from None
        if answer.status >= 400:
            message = _message(content)
            raise ServerError(answer.status, f"{self.url}{path} answered {answer.status}{message and ': '}{message}")
        if answer.content_type != "application/json":
            return content.decode(errors="replace")
        try:
            return json.loads(content)
        except ValueError:
            sentence = f"{self.url}{path} answered JSON that does not decode"
            raise ServerError(answer.status, sentence, reason="bad_answer") from None


def own_address(host: str, port: int) -> str:
    """The address of this machine as ``host`` sees it; nothing is sent. Raises OSError where no network leads there."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # chooses the network interface
        return str(probe.getsockname()[0])


def doubled(pause_s: float, times: int) -> float:
    """``pause_s`` doubled ``times`` times, at most _LONGEST_PAUSE_S."""
    return min(_LONGEST_PAUSE_S, pause_s * 2 ** min(times, 30))


def without_tokens(message: Any) -> str:
    """A server's message, shortened, and without anything that looks like a list of token ids."""
    return re.sub(r"[\[{][^\]}]*[\]}]*", "[...]", str(message))[:200]


def _message(content: bytes) -> str:
    try:
        answer = json.loads(content)
    except ValueError:
        return ""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error") or answer.get("message") or answer.get("detail") or ""
    return without_tokens(error.get("message", "") if isinstance(error, dict) else error)
