"""A Hugging Face Hub on this machine, for tests and for trying out a push: what huggingface_hub
0.36 to 2.x asks of it, over HTTP, with faults on order.

Not here: Xet storage, redirects to another host, gated repositories.

    with LocalHub() as hub:
        environment = hub.environment("ada")     # HF_ENDPOINT, HF_TOKEN, ...
"""

import json
import sys
import threading
import urllib.parse
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from .api import Answer, Api, Request
from .faults import Fault, Faults
from .store import HubError, Store


@dataclass(frozen=True)
class User:
    """Somebody with a token; the role is what the token may do: "read" or "write"."""

    name: str
    role: str
    token: str


class LocalHub:
    """The server, on a free port; a context manager.

    Attributes:
        store: everything it keeps.
        faults: what is to go wrong.
        log: every request as (method and path, status that was answered); 0 for none.
    """

    def __init__(self) -> None:
        self.store = Store()
        self.faults = Faults()
        self.log: list[tuple[str, int]] = []
        self.users: dict[str, User] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.api = Api(self.store, self.endpoint)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "LocalHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def user(self, name: str, role: str = "write") -> User:
        """An account and its token, which looks like a real one."""
        token = f"hf_{name}{role}".ljust(37, "x")
        return self.users.setdefault(token, User(name, role, token))

    def environment(self, name: str | None, role: str = "write") -> dict[str, str]:
        """Variables that point a real client here, as this user or as nobody."""
        token = {"HF_TOKEN": self.user(name, role).token} if name else {}
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            **token,
        }

    def order(self, pattern: str, **what: Any) -> Fault:
        """Order a `Fault` at the next requests that match."""
        return self.faults.order(Fault(pattern, **what))

    def lines(self) -> list[str]:
        """Every request so far, "METHOD /path"."""
        return [line for line, _ in self.log]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: LocalHub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that die in mid-request are part of the tests; anything else is a mistake
        here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: Any) -> None:
        """The server keeps its own log."""

    def _serve(self) -> None:
        hub = cast(_Server, self.server).hub
        path, _, query = self.path.partition("?")
        line = f"{self.command} {path}"
        fault = hub.faults.take(line)
        if fault and not fault.after:
            fault.happen()
            if fault.cut:
                self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
                self._drop(line)
                return
        body = self._body()
        if body is None:
            self._drop(line)
            return
        if fault and fault.status and not fault.after:
            answer = _faulty(fault)
        else:
            answer = self._answer(path, query, body)
            if fault and fault.after:
                fault.happen()
                answer = _faulty(fault) if fault.status else answer
        hub.log.append((line, 0 if fault and fault.cut else answer.status))
        self._send(answer, cut=bool(fault and fault.cut))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - http.server's names

    def _body(self) -> bytes | None:
        """What the client sent; None if it was not all."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            return body if len(body) == length else None
        parts = []
        while line := self.rfile.readline():
            size = int(line.split(b";")[0], 16)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if size == 0:
                return b"".join(parts)
        return None

    def _answer(self, path: str, query: str, body: bytes) -> Answer:
        hub = cast(_Server, self.server).hub
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        user = hub.users.get(token) if scheme == "Bearer" else None
        request = Request(
            self.command,
            [urllib.parse.unquote(part) for part in path.strip("/").split("/")],
            dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
            body,
            user,
            self.headers.get("Range"),
        )
        try:
            if token and user is None:
                raise HubError(401, "", "Invalid credentials in Authorization header")
            with hub.store.lock:
                return hub.api.answer(request)
        except HubError as error:
            headers = {"X-Error-Message": error.message}
            if error.code:
                headers["X-Error-Code"] = error.code
            return Answer(error.status, json.dumps({"error": error.message}).encode(), headers)

    def _send(self, answer: Answer, *, cut: bool) -> None:
        self.send_response(answer.status)
        headers = {"Content-Type": "application/json", **answer.headers}
        headers.setdefault("Content-Length", str(len(answer.body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def _drop(self, line: str) -> None:
        cast(_Server, self.server).hub.log.append((line, 0))
        self.close_connection = True


def _faulty(fault: Fault) -> Answer:
    headers = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
    headers["Content-Type"] = "text/html"  # as machines in between answer
    return Answer(fault.status or 500, b"<html>ordered by the test</html>", headers)
