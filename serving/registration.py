"""Registration with an engine: once a process, and never an exception, because an engine that
drafts otherwise, or not at all, must not notice this package."""

import logging
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata

from .hooking import Undo, Unfit

logger = logging.getLogger(__name__)
_NAMESAKE = "flashmap"  # another distribution with the same import name


class Registration:
    """The hooks of one engine, in or out.

    Args:
        engine: its name, for messages.
        versions: those that it may have, shortened as `version` does, and how each was tried.
        version: gives the engine's version, and the key of `versions` for it.
        install: puts the hooks in.
    """

    def __init__(
        self,
        engine: str,
        versions: Mapping[str, str],
        version: Callable[[], tuple[str, str]],
        install: Callable[[], list[Undo]],
    ) -> None:
        self.engine, self.versions = engine, versions
        self._version, self._install = version, install
        self._installed: list[Undo] = []

    def register(self) -> None:
        """Put the hooks in, once; warn and leave the engine alone where that is not possible."""
        if self._installed:
            return
        obstacle = self._obstacle()
        if obstacle is None:
            try:
                self._installed.extend(self._install())
            except Unfit as error:
                name = self.engine
                obstacle = f"this {name} is not the one its hooks were made for: {error}"
            except Exception:  # noqa: BLE001 - a plugin must not stop an engine that does without
                obstacle = traceback.format_exc()
        if obstacle is not None:
            logger.warning("FlashMap is not available in this %s: %s", self.engine, obstacle)

    def unregister(self) -> None:
        """Take every hook out again."""
        while self._installed:
            self._installed.pop()()

    def _obstacle(self) -> str | None:
        full, release = self._version()
        if release not in self.versions:
            known = ", ".join(f"{version} ({how})" for version, how in self.versions.items())
            return f"it is {full}, and flashmap-hub supports {known}. Install one of them."
        try:
            other = metadata.version(_NAMESAKE)
        except metadata.PackageNotFoundError:
            return None
        return (
            f"the distributions flashmap {other} and flashmap-hub are both installed, and import as"
            " the same package. Uninstall one: pip uninstall flashmap."
        )
