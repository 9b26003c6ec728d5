"""A hub on loopback: the few calls that huggingface_hub makes to list and download a repository."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlparse


def commit_of(folder: Path) -> str:
    return hashlib.sha1(str(folder).encode()).hexdigest()


@dataclass
class Hub:
    """repos: (name, revision) -> folder. gated: names that ask for a licence. breaks: files whose first
    download ends after so many bytes. log: what was asked, with the range if there was one.
    """

    repos: dict[tuple[str, str], Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    breaks: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def folder(self, repo: str, revision: str) -> Path | None:
        for (name, known), folder in self.repos.items():
            if name == repo and revision in (known, commit_of(folder)):
                return folder
        return None

    def downloaded(self) -> set[str]:
        """Paths of files whose content was asked for."""
        found = (re.fullmatch(r"/[^/]+/[^/]+/resolve/[^/]+/(.+)", path) for verb, path, _ in self.log)
        verbs = (verb for verb, _, _ in self.log)
        return {m[1] for m, verb in zip(found, verbs, strict=True) if m and verb == "GET"}


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.hub.log.append((self.command, path, self.headers.get("Range")))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
            self.listing(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.content(match[1], match[2], match[3])
        else:
            self.refuse(404, "EntryNotFound")

    def listing(self, repo: str, kind: str, revision: str) -> None:
        folder = self.found(repo, revision)
        if folder is None:
            return
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [(path.relative_to(folder).as_posix(), path) for path in files]
        if kind == "tree":
            value: object = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": self.etag(path)}
                for name, path in names
            ]
        else:
            siblings = [
                {"rfilename": name, "size": path.stat().st_size, "blobId": self.etag(path)}
                for name, path in names
            ]
            value = {"id": repo, "modelId": repo, "sha": commit_of(folder), "siblings": siblings}
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def content(self, repo: str, revision: str, name: str) -> None:
        folder = self.found(repo, revision)
        if folder is None:
            return
        path = folder / name
        if not path.is_file():
            self.refuse(404, "EntryNotFound")
            return
        data = path.read_bytes()
        start = int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")) else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{self.etag(path)}"')
        self.send_header("X-Repo-Commit", commit_of(folder))
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = self.hub.breaks.pop(name, None)
        self.wfile.write(data[start:end])
        if end is not None:
            self.wfile.flush()
            self.close_connection = True

    def found(self, repo: str, revision: str) -> Path | None:
        if repo in self.hub.gated:
            self.refuse(403, "GatedRepo")
            return None
        if not any(name == repo for name, _ in self.hub.repos):
            self.refuse(404, "RepoNotFound")
            return None
        folder = self.hub.folder(repo, revision)
        if folder is None:
            self.refuse(404, "RevisionNotFound")
        return folder

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"no: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def etag(self, path: Path) -> str:
        return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub that answers until the end of the block."""
    hub = Hub()
    handler = type("OwnHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
