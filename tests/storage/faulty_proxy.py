"""A proxy in front of an S3 server that answers some requests with faults.

python -m tests.storage.faulty_proxy PORT SERVER_PORT FOLDER SEED

Each request starts a series of faults of one kind with a probability of 1/16. FOLDER/calm, a file, stops them. Each
fault is a line of FOLDER/faults: its kind and the request. FOLDER/always has the kind of all faults, for tests.
FOLDER/quiet has the number of requests that are answered before faults begin; the proxy counts it down.
"""

import random
import socket
import struct
import sys
import time
from collections import defaultdict
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

KINDS = ("throttled", "unavailable", "internal", "expired", "reset", "reset after", "truncated", "stale", "slow")
ERRORS = {
    "throttled": (503, "SlowDown", "Please reduce your request rate."),
    "unavailable": (503, "ServiceUnavailable", "Service is unable to handle request."),
    "internal": (500, "InternalError", "We encountered an internal error. Please try again."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
}
SERIES = (1, 1, 1, 2, 3, 6, 12, 16)
"""Lengths of series, of which the longest outlast the retries of the clients."""
SLOW_SECONDS = 0.5
HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "date", "server", "keep-alive"}


class Faults:
    """Chooses the fault of each request."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._kind = ""
        self._left = 0
        self._lock = Lock()

    def next(self, request: str, possible: set[str]) -> str:
        """The kind of the fault of a request, or an empty text; it is recorded."""
        with self._lock:
            if (self._folder / "always").exists():
                kind = (self._folder / "always").read_text()
                return kind if kind in possible else ""
            if (self._folder / "calm").exists():
                self._left = 0
                return ""
            quiet = int((self._folder / "quiet").read_text())
            if quiet:
                (self._folder / "quiet").write_text(str(quiet - 1))
                return ""
            if not self._left and self._random.random() < 1 / 16:
                self._kind = self._random.choice(KINDS)
                self._left = self._random.choice(SERIES)
            if not self._left or self._kind not in possible:
                return ""
            self._left -= 1
            with (self._folder / "faults").open("a") as log:
                log.write(f"{self._kind}\t{request}\n")
            return self._kind


class Handler(BaseHTTPRequestHandler):
    """Passes requests to the server, except those with a fault."""

    protocol_version = "HTTP/1.1"
    server_port: ClassVar[int]
    faults: ClassVar[Faults]
    listings: ClassVar[dict[str, list[Any]]] = defaultdict(list)
    """The earlier answers of each listing."""

    def handle_request(self) -> None:
        """Answer a request of any method."""
        body = self._body()
        is_listing = self.command == "GET" and "list-type=" in self.path
        possible = set(KINDS) - ({"stale"} if not self.listings[self.path] else set())
        possible -= {"truncated"} if self.command != "GET" else set()
        kind = self.faults.next(f"{self.command} {self.path}", possible)
        if kind == "slow":
            time.sleep(SLOW_SECONDS)
        if kind in ERRORS:
            self._send_error(*ERRORS[kind])
        elif kind == "reset":
            self._reset()
        elif kind == "stale":
            self._send(*random.choice(self.listings[self.path]), truncated=False)
        else:
            answer = self._forward(body)
            if is_listing:
                self.listings[self.path].append(answer)
            if kind == "reset after":
                self._reset()
            else:
                self._send(*answer, truncated=kind == "truncated")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection("127.0.0.1", self.server_port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
        connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        content = answer.read()
        headers_back = [(name, value) for name, value in answer.getheaders() if name.lower() not in HOP_HEADERS]
        if self.command == "HEAD":
            headers_back.append(("Content-Length", answer.getheader("Content-Length") or "0"))
        connection.close()
        return answer.status, headers_back, content

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, truncated: bool) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if truncated and len(content) > 1:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content)

    def _send_error(self, status: int, code: str, message: str) -> None:
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        data = b"" if self.command == "HEAD" else content.encode()
        self._send(status, [("Content-Type", "application/xml")], data, truncated=False)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def handle_one_request(self) -> None:
        """As the base class, without an error if the client closes its connection."""
        try:
            super().handle_one_request()
        except (OSError, ValueError, HTTPException):
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def main() -> None:
    """Serve until the process is killed."""
    port, server_port, folder, seed = sys.argv[1:]
    Handler.server_port = int(server_port)
    Handler.faults = Faults(Path(folder), int(seed))
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
