"""A stand-in for a gateway that keeps all that it was sent, for tests of what a client says on the wire."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Sent:
    method: str
    path: str
    """With its query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class WireLog:
    """
    Serves on a port of its own, in a thread, while it is entered. What it answers to is 200 and empty, unless `replies`
    has something else for the method and the path without its query; of several replies there the last one stays.
    """

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.replies: dict[tuple[str, str], list[Reply]] = {}
        self.answer("GET", "/system/info", {"provider": {}, "version": {}, "arch": "x86_64"})
        self.answer("GET", "/system/functions", [])
        log = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {key.lower(): value for key, value in self.headers.items()}
                log.sent.append(Sent(self.command, self.path, headers, self.rfile.read(length)))
                reply = log._reply(self.command, self.path.partition("?")[0])
                self.send_response(reply.status)
                for key, value in reply.headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, method: str, path: str, *replies: Any) -> None:
        """Each reply is a status, a `Reply`, or what is sent as JSON with 200."""
        self.replies[method, path] = [_as_reply(each) for each in replies]

    def requests(self, but: str = "/system/info") -> list[tuple[str, str]]:
        """Method and path of all that was sent, but for those of the path *but*."""
        return [(each.method, each.path) for each in self.sent if each.path != but]

    def _reply(self, method: str, path: str) -> Reply:
        replies = self.replies.get((method, path), [Reply()])
        return replies.pop(0) if len(replies) > 1 else replies[0]

    def __enter__(self) -> "WireLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _as_reply(reply: Any) -> Reply:
    if isinstance(reply, Reply):
        return reply
    if isinstance(reply, int):
        return Reply(reply)
    return Reply(body=json.dumps(reply).encode(), headers={"Content-Type": "application/json"})
