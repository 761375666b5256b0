"""The entry point that vLLM calls in each of its processes.

It never raises: an engine that drafts otherwise, or not at all, must not notice this package.
"""

import logging
import traceback
from importlib import metadata

from .hooks import VERSIONS, Undo, Unfit, install

logger = logging.getLogger(__name__)
_NAMESAKE = "flashmap"  # another distribution with the same import name
_installed: list[Undo] = []


def register() -> None:
    """Teach vLLM to draft with FlashMap releases, once; warn and leave it alone where that is not
    possible."""
    if _installed:
        return
    obstacle = _obstacle()
    if obstacle is None:
        try:
            _installed.extend(install())
        except Unfit as error:
            obstacle = f"this vLLM is not the one its hooks were made for: {error}"
        except Exception:  # noqa: BLE001 - a plugin must not stop an engine that does without it
            obstacle = traceback.format_exc()
    if obstacle is not None:
        logger.warning("FlashMap is not available in this vLLM: %s", obstacle)


def unregister() -> None:
    """Take every hook out again."""
    while _installed:
        _installed.pop()()


def _obstacle() -> str | None:
    import vllm

    release = ".".join(vllm.__version__.split(".")[:2])
    if release not in VERSIONS:
        known = ", ".join(f"{version} ({how})" for version, how in VERSIONS.items())
        return f"it is {vllm.__version__}, and flashmap-hub supports {known}. Install one of them."
    try:
        other = metadata.version(_NAMESAKE)
    except metadata.PackageNotFoundError:
        return None
    return (
        f"the distributions flashmap {other} and flashmap-hub are both installed, and import as the"
        " same package. Uninstall one: pip uninstall flashmap."
    )
