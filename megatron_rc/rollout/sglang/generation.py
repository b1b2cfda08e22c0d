"""One call of generate: every response ends exactly once, as a finished, an unfinished or a discarded sample."""

import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.rollout.sglang.http import Server, ServerError, doubled
from megatron_rc.rollout.sglang.pool import Pool
from megatron_rc.rollout.sglang.request import DamagedAnswer, Piece, Request, RouteShape
from megatron_rc.settings.sglang import SGLangSettings

_ABORT_GRACE_S = 5.0
"""An aborted request is answered after the server's current step; one without an answer by then is given up."""
_WATCH_S = 0.25  # delay at most between the limit of a request and its abort
_LAST_ABORTS_S = 2.0
"""How long the end of a run waits for abort requests in flight."""


@dataclass
class Response:
    """A sample that is being drawn."""

    prompt_ids: Sequence[int]
    seed: int
    group: int
    """Number of its prompt."""
    piece: Piece = field(default_factory=Piece)
    sample: Sample | None = None

    def end(self, discarded: str | None = None, detail: str = "", output_ids: list[int] | None = None) -> None:
        assert self.sample is None
        drawn = vars(self.piece) if output_ids is None else {**vars(self.piece), "output_ids": output_ids}
        self.sample = Sample(list(self.prompt_ids), **drawn, discarded=discarded, discarded_detail=detail)


@dataclass
class Flight:
    """A request that waits for its answer; times are the loop's."""

    server: Server
    rid: str
    task: asyncio.Task[Any]
    late_at: float
    give_up_at: float
    given_up: bool = False
    abort: asyncio.Task[None] | None = None


@dataclass
class Run:
    """Draws the responses; created in any thread, run in the pool's loop."""

    pool: Pool
    responses: Sequence[Response]
    params: SamplingParams
    settings: SGLangSettings
    vocab_size: int
    routes: RouteShape | None
    send_seeds: bool
    version: int
    ended: int = 0
    _flights: dict[str, Flight] = field(default_factory=dict)
    """Requests without an answer, by id."""
    _aborts: set[asyncio.Task[None]] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._grace_s = min(_ABORT_GRACE_S, self.settings.timeout_s)

    async def all(self) -> None:
        """End every response."""
        queue = iter(self.responses)
        workers = [self._work(queue) for _ in range(min(self.settings.concurrency, len(self.responses)))]
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(worker)
        finally:
            watch.cancel()
            if self._aborts:
                await asyncio.wait(self._aborts, timeout=_LAST_ABORTS_S)
                for abort in self._aborts:
                    abort.cancel()

    def stop(self) -> None:
        """End the responses with the tokens they have; must be called in the loop."""
        self._stopping.set()
        give_up_at = asyncio.get_running_loop().time() + self._grace_s
        for flight in self._flights.values():
            flight.give_up_at = min(flight.give_up_at, give_up_at)
        self._abort_late()

    async def _work(self, queue: Iterator[Response]) -> None:
        for response in queue:
            await self._respond(response)
            self.ended += 1

    async def _respond(self, response: Response) -> None:
        """Ask until the response has ended; failures and aborts without a new token use up the retries."""
        failures, reason, detail = 0, "server_error", "no server is left in rotation"
        loop, server = asyncio.get_running_loop(), None
        while not self._stopping.is_set():
            server = self.pool.pick(response.group, avoid=server if failures else None)
            if server is None:
                return response.end(reason, detail)
            request, is_transient = self._request(response), True
            try:
                piece, late = await self._attempt(server, request)
            except ServerError as error:
                reason, detail, is_transient = error.reason, str(error), error.is_transient
                server.failed(loop.time(), self.settings.backoff_s)
            except DamagedAnswer as damage:
                if damage.reason != "unknown_version":
                    return response.end(damage.reason, str(damage), damage.output_ids)
                # a restarted server: none of its answers count until the next update
                reason, detail = damage.reason, str(damage)
                server.out, server.syncs = detail, 0
            else:
                server.answered()
                response.piece += piece
                if piece.finish_reason != "abort":
                    return self._finish(response)
                if len(response.piece.output_ids) == self.params.max_new_tokens:
                    response.piece.finish_reason = "length"
                    return self._finish(response)
                reason, detail = ("timeout", "no time was left") if late else ("aborted", "the server aborted it")
                if self._stopping.is_set():
                    break
                if not self.settings.partial:
                    return response.end(reason, detail)
                if piece.output_ids and not late:
                    continue
            if self._stopping.is_set():
                break
            failures += 1
            if not is_transient or failures > self.settings.retries:
                return response.end(reason, detail)
            await self._rest(failures)
        response.end("aborted", "it was stopped by abort()")

    def _finish(self, response: Response) -> None:
        oldest = min(version for version, _, _ in response.piece.weight_versions)
        allowed = self.settings.max_lag
        if allowed is not None and self.version - oldest > allowed:
            return response.end("stale_version", f"drawn by weights {oldest}, {self.version} are the newest")
        return response.end()

    def _request(self, response: Response) -> Request:
        return Request(
            # ids of equal length: a server aborts every id that begins with the one it is given
            rid=uuid.uuid4().hex,
            prompt_ids=response.prompt_ids,
            drawn=response.piece.output_ids,
            params=self.params,
            vocab_size=self.vocab_size,
            seed=response.seed if self.send_seeds else None,
            routes=self.routes,
            newest_version=self.version,
        )

    async def _attempt(self, server: Server, request: Request) -> tuple[Piece, bool]:
        """The tokens drawn, and whether the answer came after the time limit, as that to an aborted request."""
        task, start = asyncio.current_task(), asyncio.get_running_loop().time()
        assert task is not None
        late_at = start + self.settings.timeout_s
        flight = self._flights[request.rid] = Flight(server, request.rid, task, late_at, late_at + self._grace_s)
        server.running += 1
        try:
            answer = await server.ask("/generate", json.dumps(request.body()).encode(), None)
            # check it before other answers are decoded: many decoded answers at once keep the garbage collector busy
            piece = request.piece(answer)
            piece.server, piece.syncs = server.name, server.syncs
            return piece, asyncio.get_running_loop().time() >= late_at
        except ServerError as error:
            if error.status is None and error.connected:
                self._abort(flight)
            raise
        except asyncio.CancelledError:
            self._abort(flight)
            if not flight.given_up or task.uncancel():
                raise
            sentence = f"{server.url}/generate did not answer within {self.settings.timeout_s:g} s"
            raise ServerError(None, sentence, reason="timeout") from None
        finally:
            server.running -= 1
            del self._flights[request.rid]

    async def _watch(self) -> None:
        """Abort late requests; give up those that are not answered even then."""
        while True:
            await asyncio.sleep(min(_WATCH_S, self.settings.timeout_s / 4))
            self._abort_late()

    def _abort_late(self) -> None:
        now = asyncio.get_running_loop().time()
        for flight in self._flights.values():
            if now >= flight.give_up_at and not flight.given_up:
                flight.given_up = True
                flight.task.cancel()
            elif now >= flight.late_at or self._stopping.is_set():
                # repeatedly: the first abort may have reached the server before the request did
                self._abort(flight)

    async def _rest(self, failures: int) -> None:
        """Wait longer after every failure, a random time so that not all return at once; stop() ends the wait."""
        pause = doubled(self.settings.backoff_s, failures - 1) * random.uniform(0.5, 1.5)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause)

    def _abort(self, flight: Flight) -> None:
        if flight.abort is None or flight.abort.done():
            flight.abort = asyncio.create_task(_abort(flight.server, flight.rid, self._grace_s))
            self._aborts.add(flight.abort)
            flight.abort.add_done_callback(self._aborts.discard)


async def _abort(server: Server, rid: str, timeout_s: float) -> None:
    """Abort if possible: a server that is gone has no request, others notice the lost connection later."""
    with contextlib.suppress(ServerError):
        await server.ask("/abort_request", json.dumps({"rid": rid}).encode(), timeout_s)
