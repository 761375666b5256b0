"""Somebody at the Space's page, in a headless browser."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE_MS = 60_000
BENIGN = "Failed to load resource"  # of a stream that the page itself closed


class Visitor:
    """Somebody at the page; `complaints` is what the browser's console said."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.complaints: list[str] = []
        tab.set_default_timeout(PATIENCE_MS)
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", self._listen)

    def _listen(self, message: Any) -> None:
        if message.type in ("error", "warning") and BENIGN not in message.text:
            self.complaints.append(message.text)

    def open(self, address: str, theme: str = "light") -> None:
        self.tab.goto(f"{address}?__theme={theme}")
        self.tab.wait_for_selector("#start:not([disabled])")

    def start(self) -> None:
        self.tab.click("#start")
        self.tab.wait_for_selector("#start[disabled]")

    def text(self, side: str) -> str:
        found: str = self.tab.locator(f"#text-{side} .prose").inner_text()
        return found

    def tokens(self, side: str) -> int:
        """How many tokens the head of a pane counts."""
        numbers = self.tab.locator(f".head.{side} .numbers span").all_inner_texts()
        return next((int(one.split()[0]) for one in numbers if one.endswith(" tokens")), 0)

    def status(self) -> str:
        return str(self.tab.locator("#status .note").inner_text())

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the page says {self.status()!r}"
            self.tab.wait_for_timeout(50)

    def wait_for_tokens(self) -> None:
        self.wait_until(lambda: self.tokens("plain") > 0 and self.tokens("flashmap") > 0)

    def wait_for_end(self) -> str:
        self.tab.wait_for_selector("#start:not([disabled])")
        return self.status()

    def slide(self, label: str, value: int) -> None:
        """Set a slider through its number field."""
        field = self.tab.get_by_role("spinbutton", name=label)
        field.fill(str(value))
        field.press("Enter")

    def open_settings(self) -> None:
        """Unfold the sliders."""
        self.tab.get_by_role("button", name="Settings").first.click()
