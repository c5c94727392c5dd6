"""Bucket servers for tests, and a proxy that simulates an unreliable network."""

import contextlib
import http.client
import http.server
import random
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "NO_PROXY": "*",
}

FORBIDDEN = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass
class Weather:
    """How a proxy handles requests and responses. By default, it forwards them."""

    is_down: bool = False
    """Close each connection without an answer."""
    drop: float = 0.0
    """The probability that a request is forwarded, but its response is lost."""
    corrupt: float = 0.0
    """The probability that one bit of the body of a response to GET is flipped."""
    forbidden: str = "never"
    """A pattern. Requests whose methods and paths match it are not permitted."""
    allowed_writes: float = float("inf")
    """The number of further PUT, POST, and DELETE requests before `is_down` becomes true."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    writes: list[str] = field(default_factory=list)
    """The methods and paths of the PUT, POST, and DELETE requests so far."""
    reads: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BucketServer:
    """A running server with an empty bucket, behind a proxy."""

    scheme: str
    environment: dict[str, str]
    """The environment variables with which clients find the server."""
    weather: Weather

    def url(self, name: str) -> str:
        """Return the URL of a folder in the bucket."""
        return f"{self.scheme}://{BUCKET}/{name}"


@contextlib.contextmanager
def serve_bucket(scheme: str) -> Iterator[BucketServer]:
    """Run a server with an empty bucket until the end of the `with` statement."""
    weather = Weather()
    if scheme == "s3":
        moto = pytest.importorskip("moto.server", reason="moto[s3] and flask-cors are missing")
        server: Any = moto.ThreadedMotoServer("127.0.0.1", _free_port(), verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        # All servers in a process share their buckets.
        for method, path in (("POST", "moto-api/reset"), ("PUT", BUCKET)):
            request = urllib.request.Request(f"http://{host}:{port}/{path}", method=method)
            urllib.request.urlopen(request).close()  # noqa: S310 (a local server)
        variable = "AWS_ENDPOINT_URL"
    else:
        port = _free_port()
        emulator = pytest.importorskip("gcp_storage_emulator.server")
        server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
        server.start()
        variable = "STORAGE_EMULATOR_HOST"
    try:
        with _proxy(port, weather) as proxy_port:
            url = f"http://127.0.0.1:{proxy_port}"
            yield BucketServer(scheme, {**CREDENTIALS, variable: url}, weather)
    finally:
        server.stop()


@contextlib.contextmanager
def _proxy(port: int, weather: Weather) -> Iterator[int]:
    # The servers sometimes answer simultaneous requests with an internal error.
    one_at_a_time = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            is_write = self.command in ("PUT", "POST", "DELETE")
            (weather.writes if is_write else weather.reads).append(f"{self.command} {self.path}")
            if is_write:
                weather.allowed_writes -= 1
                weather.is_down |= weather.allowed_writes < 0
            if weather.is_down:
                self.close_connection = True
                return
            if re.match(weather.forbidden, f"{self.command} {self.path}"):
                self.send_response(403)
                self.send_header("Content-Length", str(len(FORBIDDEN)))
                self.end_headers()
                self.wfile.write(FORBIDDEN)
                return
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
            headers["Content-Length"] = str(len(body))
            with one_at_a_time:
                upstream.request(self.command, self.path, body, headers)
                response = upstream.getresponse()
                content = bytearray(response.read())
                upstream.close()
            if weather.rng.random() < weather.drop:
                self.close_connection = True
                return
            if self.command == "GET" and content and weather.rng.random() < weather.corrupt:
                content[weather.rng.randrange(len(content))] ^= 1 << weather.rng.randrange(8)
            self.send_response(response.status)
            for key, value in response.getheaders():
                if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(key, value)
            length = response.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_any  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Print nothing."""

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore the error if a client or a server has closed its connection."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
