"""A small Hub on loopback: the part of its HTTP protocol that a push uses, with faults to switch on.

Storage is content-addressed as on the real Hub: a commit names large files by SHA-256 and small ones
by git's SHA-1, and the listing repeats these names. Altered bytes therefore show only to a reader who
fetches them (large) or compares the listing (small).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIX = ".safetensors"
SIGNATURE = "signed-upload-address-0451"


@dataclass
class Blob:
    """A file in a commit: its bytes and, for a large one, the SHA-256 under which it was committed."""

    content: bytes
    oid: str | None

    def listed(self, path: str) -> dict[str, Any]:
        git = hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()
        entry = {"type": "file", "path": path, "size": len(self.content), "oid": git}
        if self.oid is not None:
            entry["lfs"] = {"oid": self.oid, "size": len(self.content), "pointerSize": 134}
        return entry


@dataclass
class Repository:
    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, branch: str, files: dict[str, Blob], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {branch} {message}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid

    def files(self, revision: str = "main") -> dict[str, Blob]:
        return self.commits[self.branches.get(revision, revision)]

    def knows(self, revision: str) -> bool:
        return revision in self.branches or revision in self.commits


class HubStub:
    """Runs the server in a thread while the context is open.

    token: the one that is accepted.
    owners: accounts it may create repositories for.
    corrupt: names (or `*.safetensors`) whose bytes are altered on arrival.
    during_commit: called before a commit is applied, to act as somebody else.
    uploads: SHA-256 of every large file that was sent.
    """

    def __init__(self, token: str, owners: tuple[str, ...] = ("me",)):
        self.token, self.owners = token, owners
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.corrupt: set[str] = set()
        self.during_commit: Any = None
        self.upload_status = 200
        self.requests: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubStub:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def create(self, repo_id: str, *, private: bool = True, **files: bytes) -> Repository:
        repository = self.repositories[repo_id] = Repository(private)
        blobs = {name: Blob(content, None) for name, content in files.items()}
        repository.add(
            "main", {".gitattributes": Blob(b"*.safetensors lfs\n", None), **blobs}, "initial commit"
        )
        return repository


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Silent: a test prints what matters."""

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{method} {path}")
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._error(401, "", "Invalid credentials in Authorization header")
            return
        for pattern, verb, action in _ROUTES:
            if verb == method and (match := re.fullmatch(pattern, path)):
                action(self, *match.groups())
                return
        self._error(404, "", f"no route {method} {path}")

    def _answer(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message, "Content-Type": "application/json"}
        self._send(
            status,
            json.dumps({"error": message}).encode(),
            headers | ({"X-Error-Code": code} if code else {}),
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _repository(self, repo_id: str, revision: str) -> Repository | None:
        """The repository if it has that revision; else answers as the Hub does and returns None."""
        repository = self.hub.repositories.get(repo_id)
        if repository is None:
            self._error(404, "RepoNotFound", "Repository not found")
        elif not repository.knows(revision):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository
        return None

    def info(self, repo_id: str, revision: str) -> None:
        if repository := self._repository(repo_id, revision):
            sha = repository.branches.get(revision, revision)
            self._answer(
                {"id": repo_id, "sha": sha, "private": repository.private, "tags": [], "siblings": []}
            )

    def create(self) -> None:
        request = json.loads(self.body)
        repo_id = f"{request['organization']}/{request['name']}"
        if request["organization"] not in self.hub.owners:
            self._error(403, "", "You don't have the rights to create a model under this namespace")
            return
        self.hub.create(
            repo_id, private=request.get("visibility") == "private" or request.get("private", False)
        )
        self._answer({"url": f"{self.hub.endpoint}/{repo_id}"})

    def branch(self, repo_id: str, name: str) -> None:
        if repository := self._repository(repo_id, "main"):
            repository.branches[name] = repository.branches["main"]
            self._answer({})

    def tree(self, repo_id: str, revision: str) -> None:
        if repository := self._repository(repo_id, revision):
            self._answer([blob.listed(path) for path, blob in repository.files(revision).items()])

    def preupload(self, repo_id: str, revision: str) -> None:
        if repository := self._repository(repo_id, revision):
            present = repository.files(revision).items()
            known = {name: blob.oid or blob.listed(name)["oid"] for name, blob in present}
            self._answer(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIX) else "regular",
                            "shouldIgnore": False,
                            "oid": known.get(file["path"]),
                        }
                        for file in json.loads(self.body)["files"]
                    ]
                }
            )

    def batch(self, _repo_id: str) -> None:
        objects = []
        for item in json.loads(self.body)["objects"]:
            if item["oid"] not in self.hub.large:
                href = f"{self.hub.endpoint}/lfs/{item['oid']}?X-Amz-Signature={SIGNATURE}"
                item["actions"] = {"upload": {"href": href}}
            objects.append(item)
        self._answer({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        if self.hub.upload_status != 200:
            self._error(self.hub.upload_status, "", "no")
            return
        altered = bytes([self.body[0] ^ 1]) + self.body[1:]
        self.hub.large[oid] = altered if "*" + LFS_SUFFIX in self.hub.corrupt else self.body
        self.hub.uploads.append(oid)
        self._answer({})

    def validate_yaml(self) -> None:
        """The Hub's rules for the fields that a card of ours uses."""
        content = json.loads(self.body)["content"]
        block = re.match(r"---\n(.*?)\n---\n", content, re.S)
        values = yaml.safe_load(block.group(1)) if block else {}
        errors = [] if values else ["no metadata block"]
        if values:
            unknown = set(values) - {"base_model", "license", "library_name", "pipeline_tag", "tags"}
            errors += [f"unexpected {key}" for key in sorted(unknown)]
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", values.get("base_model", "a/b")):
                errors.append("base_model must be a model id")
            if not all(isinstance(tag, str) for tag in values.get("tags", [])):
                errors.append("tags must be text")
        self._answer({"errors": [{"message": error} for error in errors]}, 400 if errors else 200)

    def commit(self, repo_id: str, branch: str) -> None:
        if self.hub.during_commit:
            self.hub.during_commit()
        repository = self._repository(repo_id, branch)
        if repository is None:
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repository.branches[branch]):
            self._error(412, "", "The expected parent commit is not the branch's head")
            return
        files = dict(repository.files(branch))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
                altered = content[:-1] + b"?" if value["path"] in self.hub.corrupt else content
                files[value["path"]] = Blob(altered, None)
            elif line["key"] == "lfsFile":
                files[value["path"]] = Blob(self.hub.large[value["oid"]], value["oid"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repository.add(branch, files, header["summary"])
        self._answer({"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{oid}", "commitOid": oid})

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        if repository := self._repository(repo_id, revision):
            blob = repository.files(revision).get(path)
            if blob is None:
                self._error(404, "EntryNotFound", "Entry not found")
            else:
                self._send(200, blob.content, {"Content-Type": "application/octet-stream"})


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    (rf"/api/models/{_REPO}/revision/(.+)", "GET", _Handler.info),
    (r"/api/repos/create", "POST", _Handler.create),
    (rf"/api/models/{_REPO}/branch/(.+)", "POST", _Handler.branch),
    (rf"/api/models/{_REPO}/tree/([^/]+)", "GET", _Handler.tree),
    (rf"/api/models/{_REPO}/preupload/(.+)", "POST", _Handler.preupload),
    (rf"/{_REPO}\.git/info/lfs/objects/batch", "POST", _Handler.batch),
    (r"/lfs/([0-9a-f]{64})", "PUT", _Handler.upload),
    (r"/api/validate-yaml", "POST", _Handler.validate_yaml),
    (rf"/api/models/{_REPO}/commit/(.+)", "POST", _Handler.commit),
    (rf"/{_REPO}/resolve/([^/]+)/(.+)", "GET", _Handler.resolve),
)
