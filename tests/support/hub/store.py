"""What a Hub keeps: repositories of commits over a content-addressed store, as git has them.

Blobs are named by git's sha1 of their content, large files by sha256 with a git blob that points at
them; a commit names a whole tree and its parent. Branches, tags and pull requests are refs. All in
memory.
"""

import hashlib
import itertools
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("model", "dataset", "space", "kernel")
MAIN = "refs/heads/main"
# What the Hub puts into a new repository; its patterns decide which files are large ones.
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
LARGE_SUFFIXES = (".safetensors", ".png")
LARGE_SIZE = 10 * 2**20


class HubError(Exception):
    """A request that the Hub refuses: HTTP status, the code in X-Error-Code, and a sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class Entry:
    """A file of a tree: its git blob, the file's own size, and the sha256 of a large file."""

    oid: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Commit:
    """A whole tree of files by path, and where it came from."""

    oid: str
    tree: Mapping[str, Entry]
    parent: str | None
    title: str
    author: str


@dataclass
class Repo:
    """A repository: refs by full name, and who owns it (the id's first part)."""

    kind: str
    id: str
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return self.id.partition("/")[0]


def git_blob(content: bytes) -> str:
    """Git's name of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """The text that git keeps in place of a large file."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    return text.encode()


def is_large(path: str, size: int, sample: bytes) -> bool:
    """Whether the Hub wants a file as a large one: by its name, its size or its first bytes."""
    return size > 0 and (path.endswith(LARGE_SUFFIXES) or size > LARGE_SIZE or b"\0" in sample)


class Store:
    """Every object and repository of one Hub. Methods raise HubError."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blobs: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.commits: dict[str, Commit] = {}
        self.repos: dict[tuple[str, str], Repo] = {}
        self._serial = itertools.count(1)

    # --- repositories and refs

    def create(
        self, kind: str, repo_id: str, *, private: bool = False, settings: dict[str, Any]
    ) -> Repo:
        """A new repository with one commit."""
        if (kind, repo_id) in self.repos:
            raise HubError(409, "", f"You already created this {kind} repo: {repo_id}")
        repo = self.repos[kind, repo_id] = Repo(kind, repo_id, private, settings=settings)
        tree = {".gitattributes": self.put(ATTRIBUTES)}
        if kind == "space":
            tree["README.md"] = self.put(b"---\nsdk: gradio\n---\n")
        repo.refs[MAIN] = self._record(tree, None, "initial commit", repo.owner).oid
        return repo

    def repo(self, kind: str, repo_id: str, reader: str | None) -> Repo:
        """The repository, if `reader` may see it."""
        found = self.repos.get((kind, repo_id))
        if found is None or (found.private and found.owner != reader):
            raise HubError(404 if reader else 401, "RepoNotFound", "Repository not found")
        return found

    def find(self, repo: Repo, revision: str) -> Commit:
        """The commit that a branch, tag, full ref name or (shortened) sha means."""
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if name in repo.refs:
                return self.commits[repo.refs[name]]
        for oid in self.history(repo):
            if len(revision) >= 7 and oid.startswith(revision):
                return self.commits[oid]
        raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def history(self, repo: Repo, head: str | None = None) -> Iterable[str]:
        """Every commit of one head, or of all refs, newest first."""
        for start in [head] if head else list(repo.refs.values()):
            oid: str | None = start
            while oid:
                yield oid
                oid = self.commits[oid].parent

    def set_ref(self, repo: Repo, name: str, revision: str) -> None:
        """A new branch or tag at a revision."""
        if name in repo.refs:
            raise HubError(409, "", f"Reference already exists: {name}")
        repo.refs[name] = self.find(repo, revision).oid

    def delete_ref(self, repo: Repo, name: str) -> None:
        """Remove a branch or tag; main stays."""
        if name == MAIN:
            raise HubError(403, "", "The main branch cannot be deleted")
        if repo.refs.pop(name, None) is None:
            raise HubError(404, "RevisionNotFound", f"No reference {name}")

    # --- content

    def put(self, content: bytes) -> Entry:
        """A small file's blob."""
        oid = git_blob(content)
        self.blobs[oid] = content
        return Entry(oid, len(content))

    def put_large(self, sha256: str, content: bytes) -> None:
        """A large file; its bytes have to be what its name says."""
        if hashlib.sha256(content).hexdigest() != sha256:
            raise HubError(400, "", f"content is not that of sha256 {sha256}")
        self.large[sha256] = content

    def put_pointer(self, sha256: str) -> Entry:
        """The blob that stands for a large file which is here."""
        if sha256 not in self.large:
            raise HubError(400, "", f"LFS pointer pointed to a file that does not exist: {sha256}")
        size = len(self.large[sha256])
        return Entry(self.put(pointer(sha256, size)).oid, size, sha256)

    def content(self, entry: Entry) -> bytes:
        """The bytes of a file."""
        return self.large[entry.sha256] if entry.sha256 else self.blobs[entry.oid]

    def files(self, repo: Repo, revision: str = "main") -> dict[str, bytes]:
        """Every file of a revision by path."""
        return {path: self.content(e) for path, e in self.find(repo, revision).tree.items()}

    # --- commits

    def commit(
        self,
        repo: Repo,
        revision: str,
        changes: Mapping[str, Entry | None],
        *,
        author: str,
        title: str,
        parent: str | None = None,
        pull_request: bool = False,
    ) -> tuple[Commit, str]:
        """One commit on a branch, or as a new pull request; None deletes a path. Atomic.

        Returns the commit and its ref.
        """
        with self.lock:
            name = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
            if name not in repo.refs:
                raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            base = self.commits[repo.refs[name]]
            if pull_request:
                base = self.find(repo, parent) if parent else base
                number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
                name = f"refs/pr/{number}"
            elif parent and not base.oid.startswith(parent):
                message = (
                    f"A commit has happened since. Please refresh and try again. "
                    f"Expected parent {parent}, found {base.oid}"
                )
                raise HubError(412, "", message)
            tree = dict(base.tree)
            for path, entry in changes.items():
                if entry is None and path not in tree:
                    raise HubError(
                        404, "EntryNotFound", f"A file with this name doesn't exist: {path}"
                    )
                tree.pop(path, None)
                if entry is not None:
                    tree[path] = entry
            commit = self._record(tree, base.oid, title, author)
            repo.refs[name] = commit.oid
            return commit, name

    def _record(
        self, tree: Mapping[str, Entry], parent: str | None, title: str, author: str
    ) -> Commit:
        body = json.dumps([sorted((p, e.oid) for p, e in tree.items()), parent, title, author])
        # Like a date, the serial number tells two commits with the same content apart.
        oid = hashlib.sha1(f"{next(self._serial)} {body}".encode()).hexdigest()
        commit = self.commits[oid] = Commit(oid, dict(sorted(tree.items())), parent, title, author)
        return commit

    # --- listings, in the API's words

    def rows(self, commit: Commit, folder: str = "", *, recursive: bool) -> list[dict[str, Any]]:
        """Files and folders below `folder`."""
        prefix = f"{folder}/" if folder else ""
        files = {p: e for p, e in commit.tree.items() if p.startswith(prefix)}
        if prefix and not files:
            raise HubError(404, "EntryNotFound", f"{folder} does not exist")
        folders: set[str] = set()
        for path in files:
            parts = path.split("/")[:-1]
            folders |= {"/".join(parts[: i + 1]) for i in range(len(parts))}
        names = sorted({p for p in folders if p.startswith(prefix)} | files.keys())
        if not recursive:
            names = [name for name in names if "/" not in name.removeprefix(prefix)]
        return [file_row(n, files[n]) if n in files else folder_row(n, files) for n in names]

    def refs(self, repo: Repo) -> dict[str, list[dict[str, str]]]:
        """Branches, tags and pull requests."""

        def listed(prefix: str) -> list[dict[str, str]]:
            return [
                {"name": name.removeprefix(prefix), "ref": name, "targetCommit": oid}
                for name, oid in repo.refs.items()
                if name.startswith(prefix)
            ]

        return {
            "branches": listed("refs/heads/"),
            "tags": listed("refs/tags/"),
            "converts": [],
            "pullRequests": listed("refs/pr/"),
        }


def folder_row(path: str, files: Mapping[str, Entry]) -> dict[str, Any]:
    """A folder's line of a tree listing, named by what is in it."""
    inside = sorted((p, e.oid) for p, e in files.items() if p.startswith(f"{path}/"))
    return {
        "type": "directory",
        "path": path,
        "oid": hashlib.sha1(json.dumps(inside).encode()).hexdigest(),
        "size": 0,
    }


def file_row(path: str, entry: Entry) -> dict[str, Any]:
    """A file's line of a tree listing."""
    row: dict[str, Any] = {"type": "file", "path": path, "oid": entry.oid, "size": entry.size}
    if entry.sha256:
        size = len(pointer(entry.sha256, entry.size))
        row["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": size}
    return row
