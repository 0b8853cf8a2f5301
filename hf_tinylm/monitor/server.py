"""The web server of `hf-tinylm monitor`: three addresses, and no file of the run by its name."""

from __future__ import annotations

import ipaddress
import json
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..errors import ConfigError
from .page import AXES_SHOWN, LivePage

# Styles stand inside the drawings; scripts come from this server only.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class MonitorServer(ThreadingHTTPServer):
    """Serves the page of one run's folder.

    Raises:
        ConfigError: the address is none of this machine, or its port is taken.
    """

    daemon_threads = True

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.page = LivePage(folder)
        self.host = host
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, address = found[0][0], found[0][4]
            super().__init__((str(address[0]), int(address[1])), _Handler)
        except OSError as error:
            raise ConfigError(
                f"{host} port {port} cannot be served: {error}. Give a free port (--port 0: any) and an address of "
                "this machine (--host 127.0.0.1)."
            ) from error

    @property
    def url(self) -> str:
        """Where the page is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    @property
    def only_this_machine(self) -> bool:
        """Whether the page can be reached from this machine alone."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def answers_to(self, host: str) -> bool:
        """Whether a request's Host is an address, or a name of this machine.

        Any other name may be a web page's own, whose owner lets it point here to read the answers as that page
        ("DNS rebinding"). The port is not looked at: a tunnel has its own.
        """
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", self.host.lower(), socket.gethostname().lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class _Handler(BaseHTTPRequestHandler):
    server: MonitorServer
    timeout = 30  # seconds that a client may take for its request
    server_version, sys_version = "hf-tinylm", ""

    def do_GET(self) -> None:
        """Answer; everything that is not one of the three addresses is not found."""
        try:
            known = self.server.answers_to(self.headers.get("Host", ""))
        except ValueError:  # no address at all
            known = False
        if not known:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "This name is not one of the machine's. Use its address.\n")
            return
        where = urlsplit(self.path)
        if where.path == "/":
            self._send(HTTPStatus.OK, "text/html", self.server.page.shell())
        elif where.path == "/page.js":
            self._send(HTTPStatus.OK, "text/javascript", files(__package__).joinpath("page.js").read_text("utf-8"))
        elif where.path == "/data":
            self._news({key: values[-1] for key, values in parse_qs(where.query).items()})
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "Not found. The page is at /\n")

    do_HEAD = do_GET

    def _news(self, asked: dict[str, str]) -> None:
        axis = next((axis for axis in AXES_SHOWN if axis == asked.get("over", "tokens")), None)
        since = asked.get("since", "0")
        if axis is None or not (since.isascii() and since.isdigit() and len(since) < 16):
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "over is tokens or hours, since a whole number.\n")
            return
        news = self.server.page.news(asked.get("server", ""), int(since), axis)
        self._send(HTTPStatus.OK, "application/json", json.dumps(news))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        """Every answer, errors of the protocol too, says what a browser may do with it."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a poll every two seconds is no news."""
