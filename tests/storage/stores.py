"""Emulators of Google Cloud Storage and S3 on the loopback interface, behind a proxy that can fail.

The emulator of Google Cloud Storage ignores the condition `ifGenerationMatch`. The proxy therefore checks this
condition, one request at a time. Environment variables tell programs the address of the proxy, as for any other
endpoint.
"""

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest


@dataclass
class Proxy:
    """Forwards requests to `backend`.

    Attributes:
      status: HTTP status with which the proxy answers every request; 0 forwards requests.
      refused: number of further requests, other than GET, that the proxy answers with 503.
      checks_generations: whether the proxy checks the condition `ifGenerationMatch`.
      requests: method and path of every request that was forwarded.
      refusals: `time.monotonic()` of every request that was answered with `status`.
    """

    backend: int
    status: int = 0
    refused: int = 0
    checks_generations: bool = False
    requests: list[str] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forward(self, method: str, path: str, headers: dict, body: bytes) -> tuple:
        connection = http.client.HTTPConnection("127.0.0.1", self.backend, timeout=60)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        found = answer.status, answer.getheaders(), answer.read()
        connection.close()
        return found

    def is_stale(self, method: str, path: str, body: bytes) -> bool:
        """Returns whether the request expects a generation of its object other than the current generation."""
        query = parse_qs(urlsplit(path).query)
        expected = query.get("ifGenerationMatch")
        if not self.checks_generations or expected is None:
            return False
        bucket = re.search(r"/b/([^/]+)/o", path)[1]
        if method == "GET":
            name = unquote(re.search(r"/o/([^?]+)", path)[1])
        else:
            name = query["name"][0] if "name" in query else _name_in(body)
        place = f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        status, _, content = self.forward("GET", place, {"Host": "127.0.0.1"}, b"")
        return expected[0] != (json.loads(content)["generation"] if status == 200 else "0")


def _name_in(body: bytes) -> str:
    """Returns the name of the object in the metadata of a multipart upload."""
    return json.loads(re.search(rb'\{.*?"name".*?\}', body, re.DOTALL)[0])["name"]


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Send headers and content in one packet, because a second packet would wait 40 ms for an acknowledgement.
        wbufsize = -1
        disable_nagle_algorithm = True
        timeout = 2  # Close idle connections after 2 s, so that their threads end.

        def handle_expect_100(self) -> bool:
            """Sends the response "100 Continue" at once.

            Without this response, an S3 client waits one second before it sends the content.
            """
            super().handle_expect_100()
            self.wfile.flush()
            return True

        def answer(self) -> None:
            expected = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(expected)
            if len(body) < expected:  # The client was killed while sending.
                self.close_connection = True
                return
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            with proxy.lock:
                if proxy.refused and self.command != "GET":
                    proxy.refused -= 1
                    found = 503, [], b""
                elif proxy.status:
                    proxy.refusals.append(time.monotonic())
                    found = proxy.status, [], b""
                elif proxy.is_stale(self.command, self.path, body):
                    found = 412, [], b"{}"
                else:
                    proxy.requests.append(f"{self.command} {unquote(self.path)}")
                    found = proxy.forward(self.command, self.path, headers, body)
            status, sent, content = found
            self.send_response_only(status)
            skipped = ("connection", "transfer-encoding", "content-length")
            length = str(len(content))
            for name, value in sent:
                if self.command == "HEAD" and name.lower() == "content-length":
                    length = value
                if name.lower() not in skipped:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@contextmanager
def proxy_of(port: int, **options: object) -> Iterator[tuple[Proxy, str]]:
    """Yields a proxy of the server at a port, and its URL."""
    proxy = Proxy(port, **options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    # If a client sends a request after the emulator has ended, the handler raises an exception. Do not print its
    # traceback, which pytest would capture as output of another test.
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def google() -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Yields a proxy of an emulator of Google Cloud Storage, and the environment of its clients.

    The emulator has the bucket "train-less".
    """
    pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
    pytest.importorskip("gcp_storage_emulator", reason="needs gcp-storage-emulator")
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="train-less")
    server.start()
    try:
        port = server._api._httpd.server_address[1]
        with proxy_of(port, checks_generations=True) as (proxy, url):
            yield proxy, {"STORAGE_EMULATOR_HOST": url}
    finally:
        server.stop()


@contextmanager
def s3() -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Yields a proxy of an emulator of S3, and the environment of its clients.

    The emulator has the bucket "train-less".
    """
    boto3 = pytest.importorskip("boto3")
    server_of = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = server_of.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        with proxy_of(server.get_host_and_port()[1]) as (proxy, url):
            words = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            words |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
            with pytest.MonkeyPatch.context() as patch:
                for name, value in words.items():
                    patch.setenv(name, value)
                boto3.client("s3").create_bucket(Bucket="train-less")
            yield proxy, words
    finally:
        server.stop()
