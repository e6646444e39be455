"""Serves the run's page over HTTP from the driver, to those who have the token of its control service.

The token is given once in a form or a query, and then replaced by a cookie that is good for the page only; or it is
sent as a header with every request. No request to the page changes the run.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from socketserver import TCPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from pentad.orchestrator.control.certificate import Certificate
from pentad.orchestrator.control.server import host_port, reachable
from pentad.orchestrator.monitoring.metrics_server import HttpServer
from pentad.orchestrator.page.page_data import PageData
from pentad.schedules.ir.errors import PentadError

MOST_FORM_BYTES = 4096
KINDS = {"css": "text/css", "js": "text/javascript", "html": "text/html", "svg": "image/svg+xml"}
# Scripts must be files of this server, except for figures within the page, which have scripts and styles inline.
POLICY = "default-src 'none'; img-src 'self' data:; connect-src 'self'; frame-src 'self'; frame-ancestors 'self'; "
STRICT = POLICY + "script-src 'self'; style-src 'self'; form-action 'self'; base-uri 'none'"
WITHIN = POLICY + "script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'"
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class PageServer(HttpServer):
    """Listens from construction until `close`, over HTTPS if given a `certificate`; `url` is its address, without the
    token.

    Raises PentadError if nothing can listen there.
    """

    def __init__(self, data: PageData, host: str, port: int, token: str, certificate: Certificate | None) -> None:
        tls = None if certificate is None else certificate.context
        facts = {"data": data, "token": token, "is_secure": tls is not None}
        super().__init__("metrics.page_port", host, port, type("Handler", (_Handler,), facts), tls)
        self.data = data
        self.url = f"http{'s' * (tls is not None)}://{host_port(reachable(host), self.port)}/"

    def close(self) -> None:
        self.data.tell_end()
        super().close()


class _Handler(BaseHTTPRequestHandler):
    data: PageData
    token: str
    is_secure: bool
    server_version, sys_version = "pentad", ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        given = parse_qs(parts.query).get("token", [""])[0]
        if given:
            self._admit(given)
        elif parts.path.endswith(".css"):  # the token form uses it too
            self._asset(parts.path)
        elif not self._is_admitted():
            self._send(401, "text/html", _asset("token.html"))
        elif page := self._figures().get(parts.path):
            (kind, policy, make), view = page, self.data.now.view
            try:
                self._send(200, kind, make().encode(), policy)
                if parts.path == "/state.json":
                    self.data.answered(view)
            except PentadError as error:
                self._send(404, "text/plain", str(error).encode())
        else:
            self._asset(parts.path)

    def do_POST(self) -> None:
        """Receives the token form."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_FORM_BYTES:
            return self._send(413, "text/plain", b"expected the form of the token")
        form = parse_qs(self.rfile.read(int(length)).decode("utf-8", "replace"))
        self._admit(form.get("token", [""])[0].strip())

    def log_message(self, *_: object) -> None:
        """Prints nothing: a token in an address would stay on the run's terminal."""

    def _figures(self) -> dict[str, tuple[str, str, Callable[[], str]]]:
        data = self.data
        return {
            "/state.json": ("application/json", STRICT, lambda: _json(data.state())),
            "/experts.json": ("application/json", STRICT, lambda: _json(data.experts())),
            "/timeline.html": ("text/html", WITHIN, data.timeline_html),
            "/memory.html": ("text/html", WITHIN, data.memory_html),
            "/rank-times.svg": ("image/svg+xml", WITHIN, data.rank_times_svg),
        }

    def _asset(self, path: str) -> None:
        name = path.removeprefix("/") or "page.html"
        if name in ASSETS:
            self._send(200, KINDS[name.rpartition(".")[2]], _asset(name))
        else:
            self._send(404, "text/plain", b"there is no such page")

    def _admit(self, given: str) -> None:
        """Redirects those who know the token to the page, whose address does not contain it."""
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return self._send(401, "text/html", _asset("token.html"))
        secure = "; Secure" if self.is_secure else ""
        cookie = f"{self._cookie}={self._pass}; Path=/; HttpOnly; SameSite=Lax{secure}"
        self._send(303, "text/plain", b"", extra={"Location": "/", "Set-Cookie": cookie})

    def _is_admitted(self) -> bool:
        bearer = self.headers.get("Authorization", "")
        if hmac.compare_digest(bearer.encode(), f"Bearer {self.token}".encode()):
            return True
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._pass.encode())

    @property
    def _cookie(self) -> str:
        """The cookie's name. A host's cookies are shared by all its ports, so each run has its own."""
        return f"pentad-{cast(TCPServer, self.server).server_address[1]}"

    @property
    def _pass(self) -> str:
        """The cookie's value. Browsers send it to all servers on the host, so it is not the token, which controls the
        run."""
        return hmac.new(self.token.encode(), b"page", sha256).hexdigest()

    def _send(
        self, status: int, kind: str, body: bytes, policy: str = STRICT, *, extra: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        text = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        headers = {**text, "Content-Security-Policy": policy, **HEADERS, **(extra or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _asset(name: str) -> bytes:
    """The content of an asset; pages get the common head."""
    head = _asset("head.html") if name in ("page.html", "token.html") else b""
    return head + (files(ASSETS[name]) / "assets" / name).read_bytes()


_OWN, _DRAWINGS = "pentad.orchestrator.page", "pentad.schedules.draw"
ASSETS = {
    **dict.fromkeys(("head.html", "page.html", "token.html", "run.css", "mesh.css"), _OWN),
    **dict.fromkeys(("main.js", "mesh.js", "panel.js", "charts.js", "experts.js", "dom.js"), _OWN),
    "page.css": _DRAWINGS,
}
