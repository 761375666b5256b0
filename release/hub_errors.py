"""What the Hub's client raises, sorted: what may pass, how long to wait, and what to tell a user.

The client's own errors are those of its HTTP library, which is requests up to 0.36 and httpx from
1.0; a large file that cannot be uploaded comes as a RuntimeError around the reason.
"""

import errno
import json
import re
import tempfile

from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from .errors import ReleaseError

# Answers after which the same call may be right a moment later, and those that say that somebody
# was there first.
PASSING = {408, 429, 500, 502, 503, 504}
TAKEN = {409, 412}
_LIBRARY = HfHubHTTPError.__bases__[0].__module__.partition(".")[0]
NETWORK_ERROR: type[Exception] = next(
    kind for kind in reversed(HfHubHTTPError.__mro__) if kind.__module__.startswith(_LIBRARY)
)
# An answer that is no JSON came from a machine in between.
CLIENT_ERRORS = (NETWORK_ERROR, OSError, RuntimeError, json.JSONDecodeError)
AGAIN = "run the same command again: it goes on where this one stopped"


def may_pass(error: Exception) -> bool:
    """Whether the same call may succeed a moment later."""
    reason = _reason(error)
    if status := _status(reason):
        return status in PASSING | TAKEN
    offline = isinstance(reason, OfflineModeIsEnabled)
    return isinstance(reason, (NETWORK_ERROR, json.JSONDecodeError)) and not offline


def is_taken(error: Exception) -> bool:
    """Whether somebody was there first."""
    return _status(_reason(error)) in TAKEN


def wait_asked(error: Exception) -> float:
    """Seconds that the Hub asks to wait."""
    response = getattr(_reason(error), "response", None)
    text = response.headers.get("Retry-After") if response is not None else None
    return float(text) if text and re.fullmatch(r"[0-9.]+", text) else 0.0


def in_short(error: Exception) -> str:
    """An error in one line."""
    reason = _reason(error)
    response = getattr(reason, "response", None)
    if response is not None:
        text = response.headers.get("X-Error-Message") or ""
        return f"status {response.status_code}" + (f" ({text})" if text else "")
    return f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:300]


def explain(what: str, error: Exception, repository: str, endpoint: str) -> ReleaseError:
    """The error for the user: ``what`` failed with ``repository`` at ``endpoint``."""
    reason = _reason(error)
    status = _status(reason)
    found, expected, fix = f"{in_short(error)} from {endpoint}", "an answer", AGAIN
    if isinstance(reason, RepositoryNotFoundError):
        found = f"no {repository}, or a private one of somebody else"
        expected, fix = "a repository that this token can see", "check the id and the token"
    elif status == 401:
        found, expected = "a token that the Hub refuses", "a valid one"
        fix = "run `hf auth login`, or set HF_TOKEN to a token that has not been revoked"
    elif status == 403:
        found = f"no right to write to the {repository}: {in_short(error)}"
        expected = "a token with write access to it"
        fix = "check the owner's name, and what the token may do on the Hub's settings page"
    elif isinstance(reason, OfflineModeIsEnabled):
        found, expected, fix = "HF_HUB_OFFLINE set", "a network", "unset HF_HUB_OFFLINE"
    elif status is None and isinstance(reason, NETWORK_ERROR):
        found, expected = f"no connection to {endpoint} ({in_short(error)})", "a network"
        fix = f"check the network and HF_ENDPOINT, then {AGAIN}"
    elif getattr(reason, "errno", None) == errno.ENOSPC:
        found = f"a full disk ({in_short(error)})"
        expected, fix = f"room in {tempfile.gettempdir()}", f"make room, then {AGAIN}"
    return ReleaseError(what, found, expected, fix)


def _reason(error: Exception) -> BaseException:
    """The error under the one that the uploader raises."""
    return error.__cause__ or error if isinstance(error, RuntimeError) else error


def _status(error: BaseException) -> int | None:
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status
