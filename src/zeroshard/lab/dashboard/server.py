"""The dashboard's HTTP server: access control, security headers, and shutdown by Ctrl-C.

[Note: Names of this host]
    A foreign web site can make its own host name resolve to 127.0.0.1 (DNS rebinding), and its pages could then read
    what is served there. So a server on loopback answers only requests whose ``Host`` is a name of loopback.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from socketserver import BaseServer

from flask import Flask, Response, abort, request
from werkzeug.serving import make_server

from zeroshard.errors import UserError
from zeroshard.lab.dashboard.app import make_app
from zeroshard.lab.dashboard.request_validation import refuser

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def serve(folder: str, host: str, port: int) -> None:
    """Serve the runs below ``folder`` until the process is interrupted.

    Raises:
        UserError: there is no such folder, or the address is not available.
    """
    if not Path(folder).is_dir():
        raise UserError("dir", f"{folder} is not a folder", "give the folder that your runs are in, as runs")
    app = make_app(folder)
    server = app.server
    is_loopback = _is_loopback(host)
    if is_loopback:
        server.before_request(_refuse_other_names)
    server.before_request(refuser(app))
    _add_headers(server, app.csp_hashes())
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        listening = make_server(host, port, server, threaded=True)
    except (OSError, SystemExit, OverflowError) as error:
        raise UserError("port", f"{host}:{port} cannot be had ({error})", "choose another --port; 0: any") from None
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{listening.server_port}  runs below {Path(folder).resolve()}; Ctrl-C ends it", flush=True)
    if not is_loopback:
        print(f"whoever reaches {host} can see these runs; without --host only this machine can", file=sys.stderr)
    try:
        BaseServer.serve_forever(listening)  # werkzeug's own method swallows KeyboardInterrupt
    finally:
        listening.server_close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host) if ":" not in host else host).is_loopback
    except (OSError, ValueError):  # ValueError: not an IPv6 address, or not a valid name
        raise UserError("host", f"{host!r} is no address of this machine", "leave it out: 127.0.0.1") from None


def _refuse_other_names() -> None:
    """Answer 403 unless the request names loopback; see [Note: Names of this host]."""
    name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
    if name not in _LOOPBACK_NAMES:
        abort(403)


def _add_headers(server: Flask, hashes: Sequence[str]) -> None:
    """Add headers with which the browser itself keeps the page from contacting other servers."""
    scripts = " ".join(["'self'", *hashes])
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )

    @server.after_request
    def add(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response
