"""A Hub on the loopback interface for tests: repositories of models and datasets in a folder, and faults on order.

`python tests/hub_server.py FOLDER` prints its address and serves until its standard input closes. The token `hf_x`
belongs to the user `tester`, who may write to the namespaces `tester` and `lab`. A repository has one branch, main,
and only its last commit can be read.

Under `/_control/`: `faults` (PUT a list, see `Fault`), `requests` (GET what was asked, DELETE to forget it).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN, USER, NAMESPACES = "hf_x", "tester", ("tester", "lab")
LARGE_SUFFIXES = (".parquet", ".arrow", ".safetensors", ".gguf", ".bin", ".zst", ".gz", ".xz")
LARGE_BYTES = 10_000_000
BLOCK = 1 << 16
ROUTES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(GET) /api/whoami-v2", "whoami"),
        (r"(POST) /api/validate-yaml", "validate_yaml"),
        (r"(POST) /api/repos/create", "create"),
        (r"(DELETE) /api/repos/delete", "delete"),
        (r"(PUT) /_lfs/(?P<oid>[0-9a-f]{64})", "put_object"),
        (r"(POST) /_lfs/verify", "verify_object"),
        (r"(POST) /(?:(?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        (r"(POST) /api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        (r"(POST) /api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        (r"(PUT) /api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/settings", "settings"),
        (r"(GET) /api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/refs", "refs"),
        (r"(POST) /api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/paths-info/(?P<revision>[^/]+)", "paths_info"),
        (
            r"(GET) /api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?",
            "tree",
        ),
        (r"(GET) /api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?", "info"),
        (
            r"(GET|HEAD) /(?:(?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
            "resolve",
        ),
    )
]


@dataclass
class Fault:
    """What happens to requests whose "METHOD /path" matches the regular expression `match`, `times` times (0: always).

    Either they are answered with `status`, or the connection breaks when `break_after` bytes of their body were read,
    or they are answered as usual `delay` seconds later.
    """

    match: str
    status: int = 0
    break_after: int = -1
    delay: float = 0.0
    times: int = 0


class Refusal(Exception):
    """An answer that is not the one hoped for."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Broken(Exception):
    """A fault broke the connection."""


class Store:
    """FOLDER/models/NAMESPACE/NAME and FOLDER/datasets/...: `repo.json`, and `files/`; FOLDER/lfs: large objects.

    Files that are put into `files/` by hand are part of the repository; `repo.json` may be missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.RLock()
        self.faults: list[Fault] = []
        self.requests: list[dict[str, Any]] = []
        (folder / "lfs").mkdir(parents=True, exist_ok=True)

    def repo(self, kind: str, repo: str) -> Path:
        return self.folder / kind / repo

    def settings(self, path: Path) -> dict[str, Any]:
        file = path / "repo.json"
        return {"private": False, "commits": 1, **(json.loads(file.read_text()) if file.exists() else {})}

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        temporary = path / "repo.json.tmp"
        temporary.write_text(json.dumps(settings))
        os.replace(temporary, path / "repo.json")

    def sha(self, path: Path) -> str:
        text = f"{path.relative_to(self.folder)} {self.settings(path)['commits']}"
        return hashlib.sha1(text.encode()).hexdigest()

    def entries(self, path: Path) -> list[dict[str, Any]]:
        """Every file of a repository, as its tree lists it."""
        files = path / "files"
        found = []
        for file in sorted(files.rglob("*")):
            if file.is_file():
                found.append({"type": "file", "path": file.relative_to(files).as_posix(), **identity(file)})
        return found

    def due(self, request: str) -> Fault | None:
        """The fault that strikes a request, counted."""
        with self.lock:
            for fault in self.faults:
                if fault.times >= 0 and re.search(fault.match, request):
                    if fault.times:
                        fault.times = fault.times - 1 or -1
                    return fault
        return None


def is_large(path: str, size: int) -> bool:
    return path.endswith(LARGE_SUFFIXES) or size > LARGE_BYTES


def identity(file: Path) -> dict[str, Any]:
    """Size and ids of a file: a git blob id, and a SHA-256 when it is a large one."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        if is_large(file.name, size):
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            return {"size": size, "oid": digest[:40], "lfs": {"oid": digest, "size": size, "pointerSize": 134}}
        return {"size": size, "oid": hashlib.sha1(b"blob %d\0" % size + opened.read()).hexdigest()}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    store: Store

    def do_GET(self) -> None:
        """Any method comes here."""
        url = urlsplit(self.path)
        request, self.left, self.fault = f"{self.command} {unquote(url.path)}", None, None
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.wrote_head = False
        if url.path.startswith("/_control/"):
            return self.control(url.path)
        entry = {"request": request, "status": 0}
        self.store.requests.append(entry)
        try:
            self.fault = self.store.due(request)
            self.strike()
            for pattern, name in ROUTES:
                if match := pattern.fullmatch(request):
                    named = {key: value for key, value in match.groupdict().items() if key != "kind"}
                    if "kind" in match.groupdict():
                        named["kind"] = match.groupdict()["kind"] or "models"
                    entry["status"] = 200
                    return getattr(self, name)(**named)
            raise Refusal(404, f"{request} is nothing that this server knows")
        except Refusal as refusal:
            entry["status"] = refusal.status
            self.body()
            headers = {"X-Error-Message": str(refusal), **({"X-Error-Code": refusal.code} if refusal.code else {})}
            self.answer({"error": str(refusal)}, refusal.status, headers)
        except (Broken, BrokenPipeError, ConnectionResetError):
            entry["status"] = -1
            self.close_connection = True
            self.connection.close()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def control(self, path: str) -> None:
        body = self.body()
        if path == "/_control/faults":
            with self.store.lock:
                self.store.faults = [Fault(**fault) for fault in json.loads(body)]
        elif self.command == "DELETE":
            self.store.requests.clear()
        self.answer(self.store.requests)

    def strike(self) -> None:
        if self.fault is None:
            return
        time.sleep(self.fault.delay)
        if self.fault.break_after >= 0:
            taken = 0
            for block in self.blocks():
                taken += len(block)
                if taken >= self.fault.break_after:
                    break
            raise Broken
        if self.fault.status:
            raise Refusal(self.fault.status, "a fault that the test ordered")

    def blocks(self) -> Any:
        """The body of the request."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            if self.left == 0:
                return
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            self.left = 0
            return
        self.left = int(self.headers.get("Content-Length") or 0) if self.left is None else self.left
        while self.left > 0:
            size = min(self.left, BLOCK if self.fault is None or self.fault.break_after < 0 else 1024)
            block = self.rfile.read(size)
            if not block:
                raise Broken
            self.left -= len(block)
            yield block

    def body(self) -> bytes:
        return b"".join(self.blocks())

    def json_body(self) -> Any:
        return json.loads(self.body() or b"{}")

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def user(self) -> str | None:
        """Who asks, None without a token."""
        header = self.headers.get("Authorization")
        if header is None:
            return None
        if header != f"Bearer {TOKEN}":
            raise Refusal(401, "Invalid credentials in Authorization header")
        return USER

    def readable(self, kind: str, repo: str, revision: str | None = None) -> Path:
        """The folder of a repository that may be read; as on the Hub, one without access looks like a missing one."""
        path, user = self.store.repo(kind, repo), self.user()
        if not path.is_dir() or (self.store.settings(path)["private"] and user is None):
            raise Refusal(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if unquote(revision or "main") not in ("main", "refs/heads/main", self.store.sha(path)):
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return path

    def writable(self, kind: str, repo: str) -> Path:
        if self.user() is None:
            raise Refusal(401, "Invalid username or password.")
        path = self.readable(kind, repo)
        self.require_namespace(repo)
        return path

    def require_namespace(self, repo: str) -> None:
        namespace = repo.split("/")[0]
        if namespace not in NAMESPACES:
            raise Refusal(403, f'You don\'t have the rights to write to the namespace "{namespace}"')

    def whoami(self) -> None:
        if self.user() is None:
            raise Refusal(401, "Invalid username or password.")
        orgs = [{"type": "org", "name": name, "roleInOrg": "admin"} for name in NAMESPACES if name != USER]
        token = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        self.answer({"type": "user", "name": USER, "fullname": USER, "orgs": orgs, "auth": token})

    def validate_yaml(self) -> None:
        self.body()
        self.answer({"errors": [], "warnings": []})

    def create(self) -> None:
        asked = self.json_body()
        if self.user() is None:
            raise Refusal(401, "Invalid username or password.")
        kind, repo = f"{asked.get('type') or 'model'}s", f"{asked.get('organization') or USER}/{asked['name']}"
        self.require_namespace(repo)
        url = f"http://{self.headers['Host']}/{'datasets/' if kind == 'datasets' else ''}{repo}"
        with self.store.lock:
            path = self.store.repo(kind, repo)
            if path.is_dir():
                return self.answer({"error": "You already created this repo", "url": url}, 409)
            (path / "files").mkdir(parents=True)
            self.store.save(path, {"private": is_private(asked), "commits": 1})
        self.answer({"url": url, "name": repo, "id": repo})

    def delete(self) -> None:
        asked = self.json_body()
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        shutil.rmtree(self.writable(f"{asked.get('type') or 'model'}s", repo))
        self.answer({})

    def settings(self, kind: str, repo: str) -> None:
        asked, path = self.json_body(), self.writable(kind, repo)
        with self.store.lock:
            self.store.save(path, {**self.store.settings(path), "private": is_private(asked)})
        self.answer({"private": is_private(asked)})

    def preupload(self, kind: str, repo: str, revision: str) -> None:
        asked, _ = self.json_body(), self.writable(kind, repo)
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if is_large(file["path"], file["size"]) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in asked["files"]
        ]
        self.answer({"files": modes})

    def batch(self, kind: str, repo: str) -> None:
        asked, _ = self.json_body(), self.writable(kind, repo)
        here = f"http://{self.headers['Host']}/_lfs"
        objects = []
        for wanted in asked["objects"]:
            found = {"oid": wanted["oid"], "size": wanted["size"]}
            if not (self.store.folder / "lfs" / wanted["oid"]).exists():
                found["actions"] = {"upload": {"href": f"{here}/{wanted['oid']}"}, "verify": {"href": f"{here}/verify"}}
            objects.append(found)
        self.answer({"transfer": "basic", "objects": objects})

    def put_object(self, oid: str) -> None:
        digest, path = hashlib.sha256(), self.store.folder / "lfs" / oid
        temporary = path.with_name(f"{oid}.{threading.get_ident()}")
        with open(temporary, "wb") as file:
            for block in self.blocks():
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != oid:
            temporary.unlink()
            raise Refusal(400, f"the uploaded bytes have SHA-256 {digest.hexdigest()}, not {oid}")
        os.replace(temporary, path)
        self.answer({})

    def verify_object(self) -> None:
        asked = self.json_body()
        path = self.store.folder / "lfs" / asked["oid"]
        if not path.exists() or path.stat().st_size != asked["size"]:
            raise Refusal(404, "Object does not exist or has another size")
        self.answer({})

    def commit(self, kind: str, repo: str, revision: str) -> None:
        lines, path = [json.loads(line) for line in self.body().splitlines()], self.writable(kind, repo)
        self.readable(kind, repo, revision)
        objects = [line["value"]["oid"] for line in lines if line["key"] == "lfsFile"]
        if missing := [oid for oid in objects if not (self.store.folder / "lfs" / oid).exists()]:
            raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {missing[0]}")
        with self.store.lock:
            for line in lines:
                self.apply(path / "files", line["key"], line["value"])
            settings = self.store.settings(path)
            self.store.save(path, {**settings, "commits": settings["commits"] + 1})
        prefix = "datasets/" if kind == "datasets" else ""
        url = f"http://{self.headers['Host']}/{prefix}{repo}/commit/{self.store.sha(path)}"
        self.answer({"success": True, "commitOid": self.store.sha(path), "commitUrl": url, "hookOutput": ""})

    def apply(self, files: Path, key: str, value: dict[str, Any]) -> None:
        if key == "header":
            return
        target = files / value["path"]
        assert files in target.resolve().parents, f"{value['path']} leaves its repository"
        target.parent.mkdir(parents=True, exist_ok=True)
        if key == "file":
            target.write_bytes(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            shutil.copyfile(self.store.folder / "lfs" / value["oid"], target)
        elif key == "deletedFile":
            target.unlink()
        elif key == "deletedFolder":
            shutil.rmtree(target)
        else:
            raise Refusal(400, f"unknown operation {key}")

    def info(self, kind: str, repo: str, revision: str | None) -> None:
        path = self.readable(kind, repo, revision)
        settings, sha = self.store.settings(path), self.store.sha(path)
        siblings = [
            {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"], "lfs": entry.get("lfs")}
            for entry in self.store.entries(path)
        ]
        for sibling in siblings:
            if sibling["lfs"] is not None:
                sibling["lfs"] = {"sha256": sibling["lfs"]["oid"], "size": sibling["size"], "pointerSize": 134}
            else:
                del sibling["lfs"]
        facts = {"_id": sha[:24], "id": repo, "author": repo.split("/")[0], "sha": sha, "private": settings["private"]}
        more = {"gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}
        self.answer(
            {**facts, **more, "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z"}
        )

    def refs(self, kind: str, repo: str) -> None:
        path = self.readable(kind, repo)
        branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": self.store.sha(path)}
        self.answer({"branches": [branch], "converts": [], "tags": [], "pullRequests": []})

    def tree(self, kind: str, repo: str, revision: str, path: str | None) -> None:
        entries = self.store.entries(self.readable(kind, repo, revision))
        prefix = f"{path.strip('/')}/" if path else ""
        inside = [entry for entry in entries if entry["path"].startswith(prefix)]
        if path and not inside:
            raise Refusal(404, f"{path} does not exist on main", "EntryNotFound")
        folders = {
            parent.as_posix() for entry in inside for parent in Path(entry["path"]).parents if parent.as_posix() != "."
        }
        found = [folder_entry(name) for name in sorted(folders) if name.startswith(prefix)] + inside
        if self.query.get("recursive", "false").lower() not in ("true", "1"):
            found = [entry for entry in found if "/" not in entry["path"][len(prefix) :]]
        self.answer(found)

    def paths_info(self, kind: str, repo: str, revision: str) -> None:
        body, entries = self.body(), self.store.entries(self.readable(kind, repo, revision))
        if self.headers.get("Content-Type", "").startswith("application/json"):
            wanted = json.loads(body)["paths"]
        else:
            wanted = parse_qs(body.decode())["paths"]
        names = {entry["path"]: entry for entry in entries}
        found = [names[name] for name in wanted if name in names]
        found += [folder_entry(n) for n in wanted if any(entry["path"].startswith(f"{n}/") for entry in entries)]
        self.answer(found)

    def resolve(self, kind: str, repo: str, revision: str, path: str) -> None:
        repository = self.readable(kind, repo, revision)
        file = repository / "files" / path
        if not file.is_file() or repository / "files" not in file.resolve().parents:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        found = identity(file)
        start, end, status = 0, found["size"], 200
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = match.groups()
            start = int(first) if first else max(0, end - int(last))
            end = min(end, int(last) + 1) if first and last else end
            status = 206
            if start >= found["size"]:
                raise Refusal(416, "Requested range not satisfiable")
        self.send_response(status)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{found["lfs"]["oid"] if "lfs" in found else found["oid"]}"')
        self.send_header("X-Repo-Commit", self.store.sha(repository))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{found['size']}")
        self.end_headers()
        if self.command == "GET":
            with open(file, "rb") as opened:
                opened.seek(start)
                while start < end and (block := opened.read(min(BLOCK, end - start))):
                    self.wfile.write(block)
                    start += len(block)

    def log_message(self, *arguments: Any) -> None:
        """Silent: `requests` has what was asked."""


def is_private(asked: dict[str, Any]) -> bool:
    return asked.get("visibility") == "private" or asked.get("private") is True


def folder_entry(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | ValueError):
            super().handle_error(*arguments)


def main(folder: str) -> None:
    """Serve until the process that started this one closes our standard input, or is gone."""
    Handler.store = Store(Path(folder).resolve())
    server = Server(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
