"""A web server on this machine for tests: files with ranges, and as much of the Hugging Face hub as `datasets` asks."""

import json
import threading
from base64 import b64encode
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Site:
    """What is served: ``folder`` under ``/files/``, and each folder OWNER/NAME in it as a data set or model of the hub.

    ``asked`` are the requests; ``fail_once`` paths are answered with 503 the first time. ``token`` and ``password``, if
    set, are needed: ``http://user:PASSWORD@...?token=TOKEN``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.asked: list[str] = []
        self.fail_once: set[str] = set()
        self.token = self.password = ""


@contextmanager
def serve(folder: Path):
    site = Site(folder)

    class Handler(_Handler):
        pass

    Handler.site = site
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Tests are quiet."""

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        sent = self.rfile.read(length).decode()
        self._answer(body=True, sent=sent)

    def _answer(self, *, body: bool, sent: str = ""):
        path = unquote(urlsplit(self.path).path)
        self.site.asked.append(f"{self.command} {path}")
        name = b64encode(f"user:{self.site.password}".encode()).decode()
        knows = self.headers.get("Authorization") == f"Basic {name}" and self.path.endswith(f"?token={self.site.token}")
        if self.site.token and not knows:
            self._send(401, b"{}", body)
        elif path in self.site.fail_once:
            self.site.fail_once.remove(path)
            self._send(503, b"not now", body)
        elif path.startswith("/files/"):
            self._file(self.site.folder / path.removeprefix("/files/"), body)
        elif path.startswith("/datasets/") and "/resolve/" in path:
            repo, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            self._file(self.site.folder / repo / rest.partition("/")[2], body)
        elif "/resolve/" in path:  # of a model
            repo, _, rest = path.removeprefix("/").partition("/resolve/")
            self._file(self.site.folder / repo / rest.partition("/")[2], body)
        elif path.startswith(("/api/datasets/", "/api/models/")):
            self._api(path.partition("/api/")[2].partition("/")[2], sent, body)
        else:
            self._send(404, b"{}", body)

    def _api(self, path: str, sent: str, body: bool):
        parts = path.split("/")
        repo = self.site.folder / "/".join(parts[:2])
        if not repo.is_dir():
            self._json({"error": "Repository not found"}, body, 404, {"X-Error-Code": "RepoNotFound"})
            return
        if len(parts) == 2 or parts[2] == "revision":
            siblings = [{"rfilename": str(file.relative_to(repo))} for file in _files(repo)]
            name = "/".join(parts[:2])
            facts = {"_id": "1", "id": name, "sha": COMMIT, "private": False, "gated": False, "disabled": False}
            self._json({**facts, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings}, body)
        elif parts[2] == "tree":
            inside = repo / "/".join(parts[4:])
            if not inside.is_dir():
                self._json({"error": "no such entry"}, body, 404, {"X-Error-Code": "EntryNotFound"})
                return
            deep = "recursive=true" in self.path.lower()
            found = sorted(inside.rglob("*") if deep else inside.iterdir())
            self._json([_entry(each, repo) for each in found], body)
        elif parts[2] == "paths-info":
            try:
                wanted = json.loads(sent)["paths"]
            except ValueError:
                from urllib.parse import parse_qs

                wanted = parse_qs(sent).get("paths", [])
            wanted = [wanted] if isinstance(wanted, str) else wanted
            self._json([_entry(repo / each, repo) for each in wanted if (repo / each).exists()], body)
        else:
            self._send(404, b"{}", body)

    def _file(self, path: Path, body: bool):
        if not path.is_file():
            self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        tag = sha1(content).hexdigest()
        facts = {"Accept-Ranges": "bytes", "ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
        asked = self.headers.get("Range")
        if not asked:
            self._send(200, content, body, facts)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1 if last else len(content), len(content))
        facts["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self._send(206, content[begin:end], body, facts)

    def _json(self, value, body, status=200, facts=None):
        self._send(status, json.dumps(value).encode(), body, {"Content-Type": "application/json", **(facts or {})})

    def _send(self, status: int, content: bytes, body: bool, facts=None):
        self.send_response(status)
        for key, value in (facts or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(content)


def _files(repo: Path) -> list[Path]:
    return [path for path in sorted(repo.rglob("*")) if path.is_file()]


def _entry(path: Path, repo: Path) -> dict:
    name = str(path.relative_to(repo))
    oid = sha1(name.encode()).hexdigest()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": oid, "size": 0}
    return {"type": "file", "path": name, "oid": oid, "size": path.stat().st_size}
