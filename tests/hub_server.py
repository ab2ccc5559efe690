"""A server on this machine that speaks as much of the Hub's protocol as a push needs."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "a" * 24
"""The only token that it accepts."""


@dataclass
class Hub:
    """What the server holds, and what it has been asked."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by repository."""
    private: dict[str, bool] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded as LFS, by SHA-256."""
    requests: list[str] = field(default_factory=list)
    fails_at: str = ""
    """The part of a path at which it answers 422; the library asks again, five times, where it answers 500."""


@contextmanager
def serve() -> Iterator[Hub]:
    """Run the server while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Describe a repository."""
        if self._refused():
            return
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        files = self.hub.repositories.get(name)
        if files is None:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        siblings = [{"rfilename": file} for file in files]
        about = {"id": name, "sha": self._commit(name), "private": self.hub.private[name], "siblings": siblings}
        self._answer(200, about)

    def do_DELETE(self) -> None:
        """Delete a repository."""
        asked = json.loads(self._body())
        if not self._refused():
            self.hub.repositories.pop(f"{asked['organization']}/{asked['name']}")
            self._answer(200, {})

    def do_PUT(self) -> None:
        """Take an LFS file."""
        self.hub.requests.append(f"PUT {self.path}")
        content = self._body()
        self.hub.blobs[hashlib.sha256(content).hexdigest()] = content
        self._answer(200, {})

    def do_POST(self) -> None:
        """Make a repository, say how files are uploaded, or commit them."""
        body = self._body()
        if self._refused():
            return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.repositories[name] = {".gitattributes": b""}
            self.hub.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
            self._answer(200, {"url": f"{self.hub.address}/{name}", "id": name})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            kinds = {True: "lfs", False: "regular"}
            chosen = [{"path": f["path"], "uploadMode": kinds[f["path"].endswith(".safetensors")]} for f in files]
            self._answer(200, {"files": [one | {"shouldIgnore": False} for one in chosen]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            put = [{"href": f"{self.hub.address}/lfs/{one['oid']}"} for one in asked]
            objects = [{**one, "actions": {"upload": where}} for one, where in zip(asked, put, strict=True)]
            self._answer(200, {"transfer": "basic", "objects": objects})
        else:
            self._commit_files([json.loads(line) for line in body.splitlines()])

    def _commit_files(self, lines: list[dict[str, Any]]) -> None:
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.repositories[name][value["path"]] = self.hub.blobs[value["oid"]]
        url = f"{self.hub.address}/{name}/commit/{self._commit(name)}"
        self._answer(200, {"success": True, "commitOid": self._commit(name), "commitUrl": url, "hookOutput": ""})

    def _commit(self, name: str) -> str:
        return hashlib.sha1(str(sorted(self.hub.repositories[name].items())).encode()).hexdigest()

    def _refused(self) -> bool:
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
            return True
        if self.hub.fails_at and self.hub.fails_at in self.path:
            self._answer(422, {"error": "out of order"})
            return True
        return False

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {
            "content-type": "application/json",
            "content-length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(content)
