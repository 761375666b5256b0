"""The one error of the release pipeline: a check that failed, with everything needed to mend it."""


class ReleaseError(ValueError):
    """A release step found something wrong.

    Attributes:
        check: name of the check or step.
        found: what is there, with values and the path.
        expected: what should be there.
        fix: what to do about it.
    """

    def __init__(self, check: str, found: str, expected: str, fix: str) -> None:
        super().__init__(f"{check}: found {found}; expected {expected}. {fix}")
        self.check = check
        self.found = found
        self.expected = expected
        self.fix = fix
