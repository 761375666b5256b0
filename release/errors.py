"""The one error of the release pipeline: a check that failed, with everything needed to mend it."""

from collections.abc import Iterable


class ReleaseError(ValueError):
    """A release step found something wrong.

    Attributes:
        check: name of the check or step.
        found: what is there, with values and the path.
        expected: what should be there.
        fix: what to do about it.
        files: the files of the folder that are to blame, so that no other check tells of them too.
    """

    def __init__(
        self, check: str, found: str, expected: str, fix: str, files: Iterable[str] = ()
    ) -> None:
        super().__init__(f"{check}: found {found}; expected {expected}. {fix}")
        self.check = check
        self.found = found
        self.expected = expected
        self.fix = fix
        self.files = frozenset(files)
