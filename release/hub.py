"""One Hub repository as a push sees it: what it holds, and calls that outlive a bad connection.

A call that failed may have been carried out: the answer can be what got lost. So nothing is sent
twice before what is there has been looked at (`settle`), and every failure ends in one ReleaseError
that says what was asked, what came back and what to do.
"""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
)
from huggingface_hub import __version__ as client_version
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from flashmap import __version__

from .errors import ReleaseError
from .hub_errors import AGAIN, CLIENT_ERRORS, explain, in_short, is_taken, may_pass, wait_asked
from .names import require_repo_id
from .plan import Plan, RemoteFile

log = logging.getLogger(__name__)
T = TypeVar("T")
# Seconds between attempts, if the Hub does not ask for more.
WAITS = (1.0, 2.0, 4.0, 8.0)
LONGEST_WAIT = 300.0


class HubRepo:
    """A repository of the Hub that the environment names, read and written with the client's token.

    ``kind`` is "model", "space" or "kernel". Raises ReleaseError for an id that no repository can
    have, and for a kind that the installed client does not know.
    """

    def __init__(self, repo_id: str, kind: str = "model") -> None:
        require_repo_id(repo_id)
        if kind == "kernel" and not hasattr(constants, "REPO_TYPES_WITH_KERNEL"):
            raise ReleaseError(
                "client",
                f"huggingface_hub {client_version}, which knows no kernel repositories",
                "huggingface_hub 2 or newer",
                "push the kernels from an environment with transformers 5",
            )
        self.id, self.kind = repo_id, kind
        self.api = HfApi(library_name="flashmap", library_version=__version__)

    @property
    def url(self) -> str:
        """Where people see it."""
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        return f"{self.api.endpoint}/{prefix}{self.id}"

    # --- what is there

    def require_writer(self) -> None:
        """Raise ReleaseError unless there is a token that the Hub accepts and that may write."""
        token = get_token()
        login = "run `hf auth login` with a token that may write, or set HF_TOKEN"
        if token is None:
            raise ReleaseError("token", "no Hugging Face token", "one that may write", login)
        if not re.fullmatch(r"[!-~]+", token):
            # An HTTP library would quote it in its complaint.
            raise ReleaseError("token", "a token with odd characters", "one as issued", login)
        who = self.ask("whoami", self.api.whoami)
        if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
            found = f"a token of {who.get('name')} that may only read"
            raise ReleaseError("token", found, f"one that may write to {self.id}", login)

    def head(self, revision: str = "main") -> str | None:
        """The commit that a branch or tag names; None if it, or the repository, does not exist."""

        def read() -> str | None:
            try:
                found = self.api.repo_info(self.id, revision=revision, repo_type=self.kind)
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None
            return found.sha

        return self.ask(f"reading {revision}", read)

    def tree(self, revision: str) -> dict[str, RemoteFile]:
        """Every file of a revision."""

        def read() -> dict[str, RemoteFile]:
            rows = self.api.list_repo_tree(
                self.id, recursive=True, revision=revision, repo_type=self.kind
            )
            return {
                row.path: RemoteFile(row.size, row.blob_id, row.lfs.sha256 if row.lfs else None)
                for row in rows
                if isinstance(row, RepoFile)
            }

        return self.ask(f"listing {revision}", read)

    def refs(self) -> dict[str, str]:
        """Commits of branches, tags and pull requests by full name, the newest request first."""

        def read() -> dict[str, str]:
            refs = self.api.list_repo_refs(self.id, repo_type=self.kind, include_pull_requests=True)
            requests = sorted(refs.pull_requests or [], key=lambda row: int(row.name), reverse=True)
            rows = [*refs.branches, *refs.tags, *requests]
            return {row.ref: row.target_commit for row in rows}

        return self.ask("listing branches and tags", read)

    def download(self, revision: str, cache: Path) -> Path:
        """Every file of a revision, through the client's own cache layout in ``cache``."""
        return Path(
            self.ask(
                "downloading",
                lambda: self.api.snapshot_download(
                    self.id, revision=revision, repo_type=self.kind, cache_dir=cache
                ),
            )
        )

    def read(self, path: str, revision: str) -> bytes:
        """One file of a revision."""
        return Path(
            self.ask(
                f"reading {path}",
                lambda: self.api.hf_hub_download(
                    self.id, path, revision=revision, repo_type=self.kind
                ),
            )
        ).read_bytes()

    # --- what is sent

    def create(self, *, private: bool) -> None:
        """Create it; one that exists already is left as it is."""
        self.api.create_repo(
            self.id,
            private=private or None,  # without a wish, what the owner's settings say
            repo_type=self.kind,
            exist_ok=True,
            space_sdk="gradio" if self.kind == "space" else None,
        )

    def commit(
        self, plan: Plan, message: str, *, revision: str, pull_request: bool = False
    ) -> CommitInfo:
        """Send what ``plan`` adds, changes and deletes as one commit, on the head it saw or not at
        all."""
        try:
            # Made anew each time: the client keeps notes in them.
            operations: list[CommitOperationAdd | CommitOperationDelete] = [
                CommitOperationAdd(path, plan.files[path].source)
                for path in [*plan.added, *plan.changed]
            ]
            operations += [CommitOperationDelete(path, is_folder=False) for path in plan.deleted]
            return self.api.create_commit(
                self.id,
                operations,
                commit_message=message,
                repo_type=self.kind,
                revision=revision,
                parent_commit=plan.head,
                create_pr=pull_request,
            )
        except CLIENT_ERRORS:
            raise
        except ValueError as error:  # a file that is gone, or metadata that the Hub refuses
            raise ReleaseError(
                "commit",
                " ".join(str(error).split()),
                "files that the Hub accepts",
                "mend them; nothing has become main",
            ) from error

    def name(self, commit: str, name: str, *, branch: bool) -> None:
        """A new tag or branch at a commit."""
        if branch:
            self.api.create_branch(self.id, branch=name, revision=commit, repo_type=self.kind)
        else:
            self.api.create_tag(self.id, tag=name, revision=commit, repo_type=self.kind)

    def delete_branch(self, name: str) -> None:
        """Remove a branch."""
        self.api.delete_branch(self.id, branch=name, repo_type=self.kind)

    # --- in spite of bad connections

    def ask(self, what: str, call: Callable[[], T]) -> T:
        """The answer to a call that changes nothing, asked again while the Hub is not well."""
        for wait in WAITS:
            try:
                return call()
            except CLIENT_ERRORS as error:
                self._pause(what, error, wait)
        try:
            return call()
        except CLIENT_ERRORS as error:
            raise self._failure(what, error) from error

    def settle(self, what: str, done: Callable[[], T | None], act: Callable[[], object]) -> T:
        """Act until ``done`` finds the result, looking before every time something is sent."""
        error: Exception | None = None
        for wait in (*WAITS, 0.0):
            found = self.ask(what, done)
            if found is not None:
                return found
            try:
                act()
                error = None
                break
            except CLIENT_ERRORS as caught:
                error = caught
                self._pause(what, caught, wait)
        found = self.ask(what, done)
        if found is not None:
            return found
        if error is not None:
            raise self._failure(what, error) from error
        raise ReleaseError(
            what, f"no trace of it in {self.url}", "what was sent and accepted", AGAIN
        )

    def _pause(self, what: str, error: Exception, wait: float) -> None:
        """Wait before the next attempt; raises ReleaseError if there is no use in one."""
        if not may_pass(error) or wait_asked(error) > LONGEST_WAIT:
            raise self._failure(what, error) from error
        # Where somebody was first, what there is can be looked at now.
        wait = 0.0 if is_taken(error) else max(wait, wait_asked(error))
        log.warning("%s: %s; trying again in %g s", what, in_short(error), wait)
        time.sleep(wait)

    def _failure(self, what: str, error: Exception) -> ReleaseError:
        return explain(what, error, f"{self.kind} repository {self.id}", self.api.endpoint)
