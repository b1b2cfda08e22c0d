"""How the nodes of a job find each other: lines of JSON over one TCP connection from every node to node 0.

A node sends its rank, then the addresses of its servers; node 0 answers with the addresses of all servers once every
node has sent its own. The connection stays open: its end, or a message, means that a node failed or the job is done.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from typing import Any


class NodeFailure(ValueError):
    """Another node cannot go on, or does not answer."""


class _Peer:
    """The other end of a connection, read without blocking."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.socket, self.name, self._buffer = connection, name, b""
        connection.settimeout(30)

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NodeFailure(f"{self.name} is gone ({error.strerror or error})") from None

    def send(self, message: dict[str, Any]) -> None:
        with self._there():
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, wait: float) -> dict[str, Any] | None:
        """The next message, or None when none comes within ``wait`` seconds."""
        deadline = time.monotonic() + wait
        while b"\n" not in self._buffer:
            if not select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            with self._there():
                data = self.socket.recv(65536)
            if not data:
                raise NodeFailure(f"{self.name} ended before the job did")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise NodeFailure(f"{self.name} sent something that is not a message")
        if "failed" in message:
            raise NodeFailure(f"{self.name}: {message['failed']}")
        return message


class Leader:
    """Node 0."""

    def __init__(self, port: int, nodes: int, job: str, timeout: float) -> None:
        """
        Args:
            job: the settings, which must be the same on every node.
            timeout: seconds that the other nodes have to connect.
        """
        self._nodes, self._job, self._timeout, self._port = nodes, job, timeout, port
        self._members: dict[int, _Peer] = {}
        try:
            self._listener = socket.create_server(("", port), backlog=nodes)
        except OSError as error:
            why = f"port {port} cannot be listened on ({error.strerror})"
            raise NodeFailure(f"{why}; --master-port takes another number") from None

    def gather(self, urls: list[str]) -> list[str]:
        """The servers of all nodes, in the order of nodes."""
        deadline = time.monotonic() + self._timeout
        while len(self._members) < self._nodes - 1:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                self._admit(_Peer(self._listener.accept()[0], "a node"))
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, self._nodes) if rank not in self._members)
                why = f"node {missing} did not come to port {self._port} within {self._timeout:g} s"
                raise NodeFailure(f"{why}; the same command must run on every node") from None
        urls_of = {0: urls}
        while len(urls_of) < self._nodes:
            for rank, peer in self._members.items():
                if rank not in urls_of and (message := peer.receive(0.1)):
                    urls_of[rank] = message["urls"]
        together = [url for rank in range(self._nodes) for url in urls_of[rank]]
        for peer in self._members.values():
            peer.send({"urls": together})
        return together

    def _admit(self, peer: _Peer) -> None:
        hello = peer.receive(10)
        if hello is None or "rank" not in hello:
            peer.socket.close()  # a port scanner, or a health check
            return
        rank, refusal = hello["rank"], None
        if hello.get("job") != self._job:
            refusal = f"node {rank} was started with other options than node 0"
        elif rank in self._members or not 1 <= rank < self._nodes:
            refusal = f"--node-rank {rank} was given to two nodes, or is not one of 0 to {self._nodes - 1}"
        if refusal:
            peer.send({"failed": refusal})
            raise NodeFailure(refusal)
        peer.name = f"node {rank}"
        self._members[rank] = peer

    def watch(self, wait: float) -> bool:
        """Wait; raises NodeFailure as soon as another node fails. Always False: node 0 decides when the job is done."""
        deadline = time.monotonic() + wait
        while (left := deadline - time.monotonic()) > 0:
            by_socket = {peer.socket: peer for peer in self._members.values()}
            for ready in select.select(list(by_socket), [], [], left)[0]:
                message = by_socket[ready].receive(0)
                if message and "finished" in message:
                    del self._members[message["finished"]]
        return False

    def finish(self, failure: str | None) -> None:
        """Tell everybody that the job is done, or why not."""
        for peer in self._members.values():
            with contextlib.suppress(NodeFailure):  # the others still need the message
                peer.send({"done": True} if failure is None else {"failed": failure})
        self._listener.close()


class Member:
    """Any other node."""

    def __init__(self, host: str, port: int, rank: int, job: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=5)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    why = f"node 0 does not answer at {host}:{port} after {timeout:g} s ({error.strerror or error})"
                    raise NodeFailure(f"{why}; is the command running there, and --master-addr right?") from None
                time.sleep(0.3)
        self._leader, self._rank = _Peer(connection, "node 0"), rank
        self._leader.send({"rank": rank, "job": job})

    def gather(self, urls: list[str]) -> list[str]:
        self._leader.send({"urls": urls})
        while (message := self._leader.receive(3600)) is None:
            pass
        return list(message["urls"])

    def watch(self, wait: float) -> bool:
        """Wait; True when node 0 says that the job is done, NodeFailure when it or another node fails."""
        message = self._leader.receive(wait)
        return message is not None and "done" in message

    def finish(self, failure: str | None) -> None:
        """Tell node 0 that this node is done, or why not; node 0 may have ended already."""
        with contextlib.suppress(NodeFailure):
            self._leader.send({"finished": self._rank} if failure is None else {"failed": failure})
        self._leader.socket.close()


class Alone:
    """A job of one node."""

    def gather(self, urls: list[str]) -> list[str]:
        return urls

    def watch(self, wait: float) -> bool:
        time.sleep(wait)
        return False

    def finish(self, failure: str | None) -> None: ...
