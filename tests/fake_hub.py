"""A Hub in one process: as much of its HTTP protocol as huggingface_hub needs to make a repository and commit files.

    GET  /api/whoami-v2                                   who the token is
    GET  /api/models/REPO[/revision/NAME]                 404 with X-Error-Code where it does not exist
    POST /api/repos/create                                409 where it exists
    POST /api/models/REPO/branch/NAME
    POST /api/validate-yaml                               front matter of the card
    POST /api/models/REPO/preupload/REVISION              which files go as LFS objects
    POST /REPO.git/info/lfs/objects/batch, PUT /lfs/OID   the objects
    POST /api/models/REPO/commit/REVISION[?create_pr=1]   all files at once, or nothing

`faults` breaks requests: {part of "METHOD path": [what happens next, ...]}; an int is a status, "drop" closes the
connection without an answer, "late" does what was asked and then closes it. What was asked is in `asked`, committed
files in `repos[REPO][branch][path]`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

TOKEN = "hf_" + "Test" * 8  # put together here: no file of this project holds something that looks like a secret


@contextmanager
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """huggingface_hub with a network, the plain HTTP transfer and no waiting between retries."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    huggingface_hub.utils.disable_progress_bars()
    yield
    huggingface_hub.utils.enable_progress_bars()
    huggingface_hub.close_session()


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.role = "write"
        self.models = {"some-org/target"}  # exist, and are not ours
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.faults: dict[str, list[int | str]] = {}
        self.asked: list[str] = []
        self.lock = threading.Lock()

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of the game."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        hub, url = self.server, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what = f"{self.command} {unquote(url.path)}"
        with hub.lock:
            hub.asked.append(what)
            fault = next((f.pop(0) for part, f in hub.faults.items() if part in what and f), None)
        self.mute = fault == "late"
        if fault == "drop":
            return self._hang_up()
        if isinstance(fault, int):
            return self._answer(fault, {"error": "planned by the test"})
        if "/lfs/" not in url.path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        for pattern, method in _ROUTES.items():
            if found := re.fullmatch(pattern, what):
                return getattr(self, method)(*found.groups(), body=body, query=parse_qs(url.query))
        self._answer(404, {"error": f"this Hub has no {what}"})

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, value: Any, **headers: str) -> None:
        if self.mute:
            return self._hang_up()
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, content in headers.items():
            self.send_header(name.replace("_", "-"), content)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    # -- routes --------------------------------------------------------------------------------------------------------
    def whoami(self, **_: Any) -> None:
        self._answer(200, {"name": "tester", "type": "user", "auth": {"accessToken": {"role": self.server.role}}})

    def info(self, repo: str, **_: Any) -> None:
        if repo not in self.server.models | self.server.repos.keys():
            return self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        self._answer(200, {"id": repo, "sha": "0" * 40, "siblings": [], "tags": [], "downloads": 0, "likes": 0})

    def create(self, body: bytes, **_: Any) -> None:
        wanted = json.loads(body)
        repo = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] == "not-mine":
            return self._answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        if repo in self.server.repos:
            return self._answer(
                409, {"error": "You already created this model repo", "url": f"{self.server.url}/{repo}"}
            )
        self.server.repos[repo] = {"main": {}}
        self.server.private[repo] = wanted.get("private", wanted.get("visibility") == "private")
        self._answer(200, {"url": f"{self.server.url}/{repo}", "name": repo})

    def branch(self, repo: str, name: str, **_: Any) -> None:
        if name in self.server.repos[repo]:
            return self._answer(409, {"error": "Reference already exists"})
        self.server.repos[repo][name] = dict(self.server.repos[repo]["main"])
        self._answer(200, {})

    def validate(self, body: bytes, **_: Any) -> None:
        content = json.loads(body)["content"]
        head = yaml.safe_load(content.split("---\n")[1])
        faults = (
            [] if re.fullmatch(r"[a-z0-9.-]+", str(head.get("license", ""))) else [{"message": '"license" is wrong'}]
        )
        self._answer(200 if not faults else 400, {"errors": faults, "warnings": []})

    def preupload(self, repo: str, revision: str, body: bytes, **_: Any) -> None:
        names = [file["path"] for file in json.loads(body)["files"]]
        modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
        held = self.server.repos[repo].get(revision, {})
        self._answer(200, {"files": [
            {"path": n, "uploadMode": modes[n], "shouldIgnore": False, "oid": _oid(held[n], modes[n]) if n in held else None}
            for n in names
        ]})  # fmt: skip

    def batch(self, repo: str, body: bytes, **_: Any) -> None:
        found = []
        for wanted in json.loads(body)["objects"]:
            actions = {"upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}"}}
            found.append({**wanted, **({} if wanted["oid"] in self.server.objects else {"actions": actions})})
        self._answer(200, {"transfer": "basic", "objects": found})

    def upload(self, oid: str, body: bytes, **_: Any) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer(400, {"error": "the object does not have that hash"})
        self.server.objects[oid] = body
        self._answer(200, {})

    def commit(self, repo: str, revision: str, body: bytes, query: dict[str, list[str]]) -> None:
        head, *lines = [json.loads(line) for line in body.splitlines()]
        changed = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                changed[value["path"]] = self.server.objects[value["oid"]]
            else:
                assert line["key"] == "file"
                changed[value["path"]] = base64.b64decode(value["content"])
        pull = "create_pr" in query
        place = "refs/pr/1" if pull else revision
        self.server.repos[repo].setdefault(place, {}).update(changed)
        self.server.commits.append(
            {"repo": repo, "to": place, "message": head["value"]["summary"], "files": sorted(changed)}
        )
        number = f"{len(self.server.commits):040x}"
        where = f"{self.server.url}/{repo}"
        self._answer(200, {
            "commitUrl": f"{where}/commit/{number}", "commitOid": number, "success": True,
            **({"pullRequestUrl": f"{where}/discussions/1"} if pull else {}),
        })  # fmt: skip


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = {
    r"GET /api/whoami-v2": "whoami",
    rf"GET /api/models/{_REPO}(?:/revision/.+)?": "info",
    r"POST /api/repos/create": "create",
    rf"POST /api/models/{_REPO}/branch/(.+)": "branch",
    r"POST /api/validate-yaml": "validate",
    rf"POST /api/models/{_REPO}/preupload/(.+)": "preupload",
    rf"POST /{_REPO}\.git/info/lfs/objects/batch": "batch",
    r"PUT /lfs/([0-9a-f]{64})": "upload",
    rf"POST /api/models/{_REPO}/commit/(.+)": "commit",
}


def _oid(content: bytes, mode: str) -> str:
    """What the Hub calls a file's content: sha256 of LFS objects, git's blob hash of others."""
    if mode == "lfs":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
