"""Names that a release gets on a Hub, checked before anything is made for them."""

import re

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from .errors import ReleaseError

TAG = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def require_repo_id(repo_id: str) -> None:
    """Raise ReleaseError for an id that no repository can have."""
    try:
        validate_repo_id(repo_id)
        well_formed = "/" in repo_id
    except HFValidationError:
        well_formed = False
    if not well_formed:
        raise ReleaseError(
            "repo-id",
            repr(repo_id),
            "owner/name, of letters, digits, '-', '_' and '.', 96 characters at most",
            "name the account or organisation and the repository, as in me/my-drafter",
        )


def require_tag(tag: str) -> None:
    """Raise ReleaseError for a name that no release can have."""
    if not TAG.fullmatch(tag):
        raise ReleaseError(
            "tag", repr(tag), "letters, digits, '.', '_' and '-'", "name the release as in v1.0"
        )
