"""The Hub's HTTP interface as functions from requests to answers: one method an endpoint."""

import base64
import fnmatch
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .store import KINDS, Commit, Entry, HubError, Repo, Store, is_large

if TYPE_CHECKING:
    from .server import User

DATE = "2026-01-01T00:00:00.000Z"
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


@dataclass(frozen=True)
class Request:
    """What came in: path in parts, each unquoted; `user` is None without a token."""

    method: str
    path: list[str]
    query: dict[str, str]
    body: bytes
    user: "User | None"
    range: str | None = None

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    """What goes out."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


class Api:
    """Answers requests from a store. Methods raise HubError."""

    def __init__(self, store: Store, endpoint: str) -> None:
        self.store, self.endpoint = store, endpoint
        # Large files that a client announced, by the secret in the address it was given for them.
        self._uploads: dict[str, str] = {}

    def answer(self, request: Request) -> Answer:
        """Find the endpoint and ask it."""
        match request.path:
            case ["api", "whoami-v2"]:
                return self._whoami(request)
            case ["api", "repos", "create"]:
                return self._create(request)
            case ["api", "validate-yaml"]:
                return validate_yaml(request.json())
            case ["api", kinds, owner, name, *rest] if kinds[:-1] in KINDS:
                return self._repo_call(request, self._repo(request, kinds, owner, name), rest)
            case ["upload", secret]:
                return self._upload(secret, request.body)
            case ["verify"]:
                return self._verify(request.json())
            case path if path[-4:] == ["info", "lfs", "objects", "batch"]:
                return self._batch(request, path[:-4])
            case path if "resolve" in path[2:4]:
                return self._resolve(request)
        raise HubError(404, "", f"no such endpoint: {'/'.join(request.path)}")

    # --- who, and what repositories there are

    def _whoami(self, request: Request) -> Answer:
        user = _signed_in(request)
        token = {"displayName": "test", "role": user.role}
        return _json(
            {"type": "user", "name": user.name, "orgs": [], "auth": {"accessToken": token}}
        )

    def _create(self, request: Request) -> Answer:
        wanted = request.json()
        user, kind = _signed_in(request), wanted.get("type") or "model"
        repo_id = f"{wanted.get('organization') or user.name}/{wanted['name']}"
        url = f"{self.endpoint}/{_prefix(kind)}{repo_id}"
        if (kind, repo_id) in self.store.repos:
            return _json({"error": "You already created this repo", "url": url}, 409)
        _may_write(user, repo_id.partition("/")[0])
        if kind == "space" and not wanted.get("sdk"):
            raise HubError(400, "", "a Space needs an sdk")
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.store.create(kind, repo_id, private=private, settings=wanted)
        return _json({"url": url, "name": repo_id, "id": repo_id})

    def _repo(self, request: Request, kinds: str, owner: str, name: str) -> Repo:
        user = request.user
        return self.store.repo(kinds[:-1], f"{owner}/{name}", user.name if user else None)

    # --- one repository

    def _repo_call(self, request: Request, repo: Repo, rest: list[str]) -> Answer:
        match [request.method, *rest]:
            case ["GET"]:
                return self._info(repo, "main")
            case ["GET", "revision", revision]:
                return self._info(repo, revision)
            case ["GET", "tree", revision, *folder]:
                commit = self.store.find(repo, revision)
                recursive = request.query.get("recursive", "").lower() in ("1", "true")
                rows = self.store.rows(commit, "/".join(folder), recursive=recursive)
                return _json(rows)
            case ["POST", "paths-info", revision]:
                return self._paths(request, repo, revision)
            case ["GET", "refs"]:
                return _json(self.store.refs(repo))
            case ["GET", "commits", revision]:
                return self._commits(repo, revision)
            case ["GET", "jinja-templates" | "xet-read-token", *_]:
                raise HubError(404, "", "not here")
        return self._write_call(request, repo, rest)

    def _write_call(self, request: Request, repo: Repo, rest: list[str]) -> Answer:
        user, pull_request = _signed_in(request), request.query.get("create_pr") == "1"
        if not pull_request:
            _may_write(user, repo.owner)
        match [request.method, *rest]:
            case ["POST", "preupload", revision]:
                return self._preupload(request, repo, revision)
            case ["POST", "commit", revision]:
                return self._commit(request, repo, revision, pull_request=pull_request)
            case ["POST", "branch", name]:
                start = (request.json() if request.body else {}).get("startingPoint") or "main"
                self.store.set_ref(repo, f"refs/heads/{name}", start)
                return _json({})
            case ["DELETE", "branch", name]:
                self.store.delete_ref(repo, f"refs/heads/{name}")
                return _json({})
            case ["POST", "tag", revision]:
                self.store.set_ref(repo, f"refs/tags/{request.json()['tag']}", revision)
                return _json({})
            case ["DELETE", "tag", name]:
                self.store.delete_ref(repo, f"refs/tags/{name}")
                return _json({})
        raise HubError(404, "", f"no such endpoint: {'/'.join(request.path)}")

    def _info(self, repo: Repo, revision: str) -> Answer:
        commit = self.store.find(repo, revision)
        info: dict[str, Any] = {
            "id": repo.id,
            "author": repo.owner,
            "sha": commit.oid,
            "private": repo.private,
            "gated": False,
            "disabled": False,
            "tags": [],
            "likes": 0,
            "downloads": 0,
            "lastModified": DATE,
            "createdAt": DATE,
            "siblings": [{"rfilename": path} for path in commit.tree],
        }
        if repo.kind == "space":
            info["sdk"] = repo.settings.get("sdk")
        return _json(info)

    def _paths(self, request: Request, repo: Repo, revision: str) -> Answer:
        commit, wanted = self.store.find(repo, revision), request.json()["paths"]
        rows = self.store.rows(commit, recursive=True)
        return _json([row for row in rows if row["path"] in wanted])

    def _commits(self, repo: Repo, revision: str) -> Answer:
        head = self.store.find(repo, revision).oid
        commits = [self.store.commits[oid] for oid in self.store.history(repo, head)]
        return _json(
            [
                {
                    "id": commit.oid,
                    "title": commit.title,
                    "message": "",
                    "date": DATE,
                    "authors": [{"user": commit.author}],
                }
                for commit in commits
            ]
        )

    # --- writing

    def _preupload(self, request: Request, repo: Repo, revision: str) -> Answer:
        wanted, tree = request.json(), self.store.find(repo, revision).tree
        ignore = wanted.get("gitIgnore")
        if ignore is None and ".gitignore" in tree:
            ignore = self.store.content(tree[".gitignore"]).decode()
        patterns = [line.strip() for line in (ignore or "").splitlines() if line.strip()]
        files = []
        for file in wanted["files"]:
            path, entry = file["path"], tree.get(file["path"])
            large = is_large(path, file["size"], base64.b64decode(file["sample"]))
            ignored = any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
            files.append(
                {
                    "path": path,
                    "uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": ignored,
                    "oid": (entry.sha256 or entry.oid) if entry else None,
                }
            )
        return _json({"files": files})

    def _batch(self, request: Request, path: list[str]) -> Answer:
        kinds = path.pop(0) if len(path) == 3 else "models"
        owner, name = path
        self._repo(request, kinds, owner, name.removesuffix(".git"))
        _signed_in(request)
        objects = []
        for wanted in request.json()["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.store.large:
                secret = secrets.token_hex(8)
                self._uploads[secret] = wanted["oid"]
                answer["actions"] = {
                    "upload": {"href": f"{self.endpoint}/upload/{secret}"},
                    "verify": {"href": f"{self.endpoint}/verify"},
                }
            objects.append(answer)
        return _json({"transfer": "basic", "objects": objects})

    def _upload(self, secret: str, body: bytes) -> Answer:
        if secret not in self._uploads:
            raise HubError(403, "", "no upload was announced for this address")
        self.store.put_large(self._uploads[secret], body)
        return Answer(200)

    def _verify(self, wanted: dict[str, Any]) -> Answer:
        found = self.store.large.get(wanted["oid"])
        if found is None or len(found) != wanted["size"]:
            raise HubError(404, "", f"no large file {wanted['oid']} of {wanted['size']} bytes")
        return Answer(200)

    def _commit(self, request: Request, repo: Repo, revision: str, *, pull_request: bool) -> Answer:
        header: dict[str, Any] = {}
        changes: dict[str, Entry | None] = {}
        readers: dict[str, Callable[[dict[str, Any]], Entry | None]] = {
            "file": lambda value: self.store.put(base64.b64decode(value["content"])),
            "lfsFile": lambda value: self.store.put_pointer(value["oid"]),
            "deletedFile": lambda value: None,
        }
        for line in request.body.splitlines():
            item = json.loads(line)
            if item["key"] == "header":
                header = item["value"]
            else:
                changes[item["value"]["path"]] = readers[item["key"]](item["value"])
        commit, ref = self.store.commit(
            repo,
            revision,
            changes,
            author=_signed_in(request).name,
            title=header["summary"],
            parent=header.get("parentCommit"),
            pull_request=pull_request,
        )
        url = f"{self.endpoint}/{_prefix(repo.kind)}{repo.id}"
        answer = {"commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}"}
        if pull_request:
            answer["pullRequestUrl"] = f"{url}/discussions/{ref.rpartition('/')[2]}"
        return _json({"success": True, **answer})

    # --- files

    def _resolve(self, request: Request) -> Answer:
        path = list(request.path)
        kinds = path.pop(0) if path[0][:-1] in KINDS else "models"
        owner, name, _, revision, *parts = path
        commit = self.store.find(self._repo(request, kinds, owner, name), revision)
        entry = commit.tree.get("/".join(parts))
        if entry is None:
            raise HubError(404, "EntryNotFound", f"no {'/'.join(parts)} at {commit.oid}")
        return self._file(commit, entry, request.range)

    def _file(self, commit: Commit, entry: Entry, wanted: str | None) -> Answer:
        content = self.store.content(entry)
        headers = {
            "Content-Type": "application/octet-stream",
            "X-Repo-Commit": commit.oid,
            "ETag": f'"{entry.sha256 or entry.oid}"',
            "Accept-Ranges": "bytes",
        }
        if entry.sha256:
            headers |= {"X-Linked-ETag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
        if not wanted:
            return Answer(200, content, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin = int(first) if first else max(0, len(content) - int(last))
        end = min(int(last) + 1, len(content)) if first and last else len(content)
        if begin >= end:
            return Answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        return Answer(206, content[begin:end], headers)


def _prefix(kind: str) -> str:
    return "" if kind == "model" else f"{kind}s/"


def _signed_in(request: Request) -> "User":
    if request.user is None:
        raise HubError(401, "", "Invalid username or password.")
    return request.user


def _may_write(user: "User", owner: str) -> None:
    if user.role != "write" or user.name != owner:
        message = f"You don't have the rights to write under the namespace {owner}."
        raise HubError(403, "", message)


def validate_yaml(wanted: dict[str, Any]) -> Answer:
    """Check a card's front matter: a mapping, and what a Space needs."""
    import yaml

    text = wanted["content"]
    block = text.split("---\n")[1] if text.startswith("---\n") else ""
    errors, warnings = [], []
    try:
        data = yaml.safe_load(block) or {}
    except yaml.YAMLError as error:
        data = {"": str(error)}
        errors.append(f"YAML: {error}")
    if not data:
        warnings.append("empty or missing yaml metadata in repo card")
    if wanted.get("repoType") == "space":
        if data.get("sdk") not in ("gradio", "docker", "static"):
            errors.append('"sdk" must be one of [gradio, docker, static]')
        for key in ("colorFrom", "colorTo"):
            if data.get(key, "red") not in COLOURS:
                errors.append(f'"{key}" must be one of {sorted(COLOURS)}')
        if len(data.get("short_description", "")) > 60:
            errors.append('"short_description" length must be at most 60')
    answer = {
        name: [{"message": text} for text in texts]
        for name, texts in (("errors", errors), ("warnings", warnings))
    }
    return _json(answer, 400 if errors else 200)
