"""A server in memory that answers the GraphQL requests of the wandb library, and keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

ANSWER = {
    "viewer": {"id": "1", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"features": []},
    "upsertView": {"view": {"id": "1", "name": "nw-view-v"}, "inserted": True},
}


@contextmanager
def wandb_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the list to which it appends every request."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self._body()
            if self.path == "/graphql":  # telemetry goes elsewhere
                requests.append(json.loads(body))
            answer = json.dumps({"data": ANSWER}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _body(self) -> bytes:
            if "Content-Length" in self.headers:
                return self.rfile.read(int(self.headers["Content-Length"]))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
