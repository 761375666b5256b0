"""Pushes a folder to a Hub repository so that main is, at every moment, one whole release.

A staging branch takes the commit first; it is compared with the plan, file by file, and loaded by
its sha in a fresh process. Then main gets the same operations as one commit, which the Hub applies
only if main is still where the plan saw it. A tag comes last. Every step begins by looking whether
it has been done, so a push that was killed is finished by running it again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .contents import CARD
from .errors import ReleaseError
from .hub import HubRepo
from .hub_errors import AGAIN
from .names import require_tag
from .plan import KEPT, LocalFile, Plan

# A new repository may hold these.
HUB_MADE = {KEPT, CARD}
# Pull requests that are searched for one that already proposes the same files.
REQUESTS = 20

Verify = Callable[[str], None]
Report = Callable[[str], None]


class Mark(NamedTuple):
    """The name that a release gets when it is on main: a tag never moves, a branch follows the
    releases of one version."""

    name: str
    moves: bool = False

    @property
    def ref(self) -> str:
        """Its full name."""
        return f"refs/{'heads' if self.moves else 'tags'}/{self.name}"


@dataclass(frozen=True)
class Pushed:
    """What a push did: the commit that holds the files, and whether main moved for it."""

    url: str
    commit: str
    changed: bool
    mark: str | None
    pull_request: str | None = None


def make_plan(repo: HubRepo, files: Mapping[str, LocalFile], mark: Mark | None) -> Plan:
    """Compare ``files`` with main. Raises ReleaseError for a mark that cannot be given: an odd
    name, or a tag that names other files."""
    if mark:
        require_tag(mark.name)
    head = repo.head()
    plan = Plan(files, head, repo.tree(head) if head else {})
    if mark and head and not mark.moves:
        _require_free(repo, plan, mark)
    return plan


def _require_free(repo: HubRepo, plan: Plan, mark: Mark) -> None:
    tagged = repo.refs().get(mark.ref)
    if tagged and (difference := plan.seen_in(repo.tree(tagged))):
        raise ReleaseError(
            "tag",
            f"{mark.name} at {tagged}, whose files are others ({difference})",
            "a tag that is not in use: a published one does not move",
            "choose another --tag, build with it, and push that",
        )


def push(
    repo: HubRepo,
    plan: Plan,
    *,
    message: str,
    mark: Mark | None = None,
    verify: Verify = lambda sha: None,
    private: bool = False,
    pull_request: bool = False,
    report: Report = lambda step: None,
) -> Pushed:
    """Bring ``plan`` to main, or into a pull request.

    The token should have been tried (`HubRepo.require_writer`). ``verify`` gets the sha of the
    staged commit and raises if it is not fit to be released; ``report`` gets a line as each step
    begins. Raises ReleaseError; what had been done by then is found again by the next run.
    """
    return _Push(repo, plan, message, mark, verify, private, report).run(pull_request=pull_request)


@dataclass
class _Push:
    repo: HubRepo
    plan: Plan
    message: str
    mark: Mark | None
    verify: Verify
    private: bool
    report: Report

    def run(self, *, pull_request: bool) -> Pushed:
        head = self._existing_head()
        if pull_request:
            return self._propose(head)
        if self.plan.empty:
            return self._finish(head, changed=False)
        self._verify(self._stage(head))
        self.report("committing to main")
        commit = self._commit("main", self.plan)
        return self._finish(commit, changed=True)

    def _existing_head(self) -> str:
        """The head that the plan saw; of a repository that did not exist, its first commit."""
        if self.plan.head is not None:
            return self.plan.head
        self.report(f"creating {self.repo.id}")
        head = self.repo.settle(
            "creating the repository",
            self.repo.head,
            lambda: self.repo.create(private=self.private),
        )
        remote = self.repo.tree(head)
        if remote.keys() - HUB_MADE:
            raise _moved("main", "no commit", head, "somebody else created the repository")
        self.plan = replace(self.plan, head=head, remote=remote)
        return head

    @property
    def staging(self) -> str:
        """The branch that takes the commit first."""
        return f"release/{self.mark.name if self.mark else 'next'}"

    def _stage(self, head: str) -> str:
        """Put the plan on the staging branch and return its commit."""
        ref = f"refs/heads/{self.staging}"
        self.report(f"uploading to {self.staging}")

        def ready() -> str | None:
            """The branch, if nothing but the commit is missing."""
            found = self.repo.refs().get(ref)
            if found and found != head and self.plan.seen_in(self.repo.tree(found)):
                return None  # left by another push
            return found

        def begin() -> None:
            if ref in self.repo.refs():
                self.repo.delete_branch(self.staging)
            self.repo.name(head, self.staging, branch=True)

        self.repo.settle(f"creating the branch {self.staging}", ready, begin)
        return self._commit(self.staging, self.plan)

    def _commit(self, branch: str, plan: Plan) -> str:
        """The commit that brings a branch from where ``plan`` saw it to the plan's files."""

        def done() -> str | None:
            now = self.repo.head(branch)
            if now == plan.head:
                return None
            if now is None:
                raise _moved(branch, plan.head, "no commit", "the branch was deleted")
            if difference := plan.seen_in(self.repo.tree(now)):
                raise _moved(branch, plan.head, now, difference)
            return now

        return self.repo.settle(
            f"committing to {branch}",
            done,
            lambda: self.repo.commit(plan, self.message, revision=branch),
        )

    def _verify(self, sha: str) -> None:
        self.report(f"loading {sha[:12]} in a fresh process")
        self.verify(sha)

    def _propose(self, head: str) -> Pushed:
        """Leave the plan in a pull request, and main alone."""
        if self.plan.empty:
            return Pushed(self.repo.url, head, changed=False, mark=None)
        self.report("opening a pull request")

        def done() -> tuple[str, str] | None:
            requests = [row for row in self.repo.refs().items() if row[0].startswith("refs/pr/")]
            for ref, sha in requests[:REQUESTS]:
                if not self.plan.seen_in(self.repo.tree(sha)):
                    return ref, sha
            return None

        ref, sha = self.repo.settle(
            "opening a pull request",
            done,
            lambda: self.repo.commit(self.plan, self.message, revision="main", pull_request=True),
        )
        self._verify(sha)
        address = f"{self.repo.url}/discussions/{ref.rpartition('/')[2]}"
        return Pushed(self.repo.url, sha, changed=False, mark=None, pull_request=address)

    def _finish(self, commit: str, *, changed: bool) -> Pushed:
        """Name the commit, and remove the staging branch."""
        refs = self.repo.refs()
        if self.mark and not self._is_marked(refs):
            if not changed:  # then this run has not verified it
                self._verify(commit)
            self.report(f"naming it {self.mark.name}")
            self._set_mark(self.mark, commit, refs)
        if f"refs/heads/{self.staging}" in refs:
            self.repo.settle(
                f"removing the branch {self.staging}",
                lambda: f"refs/heads/{self.staging}" not in self.repo.refs() or None,
                lambda: self.repo.delete_branch(self.staging),
            )
        name = self.mark.name if self.mark else None
        return Pushed(self.repo.url, commit, changed=changed, mark=name)

    def _is_marked(self, refs: Mapping[str, str]) -> bool:
        named = refs.get(self.mark.ref) if self.mark else None
        return named is not None and not self.plan.seen_in(self.repo.tree(named))

    def _set_mark(self, mark: Mark, commit: str, refs: Mapping[str, str]) -> None:
        old = refs.get(mark.ref)
        if mark.moves and old:
            plan = Plan(self.plan.files, old, self.repo.tree(old))
            self._commit(mark.name, plan)
            return
        self.repo.settle(
            f"naming the release {mark.name}",
            lambda: self._is_marked(self.repo.refs()) or None,
            lambda: self.repo.name(commit, mark.name, branch=mark.moves),
        )


def _moved(branch: str, head: str | None, now: str, difference: str) -> ReleaseError:
    if branch == "main":
        expected = "a main that nobody moves between the plan and the commit"
        fix = "look at what came in between; running the same command again would replace it"
    else:
        expected = "the files that were sent"
        fix = f"if a .gitignore of the repository hides them, remove it there; else {AGAIN}"
    found = f"{branch} at {now}, planned on {head} ({difference})"
    return ReleaseError("head" if branch == "main" else "compare", found, expected, fix)
