"""A browser for the tests under marker `browser`: playwright with Debian's chromium."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.visitor import Visitor


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        one = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visitor]]:
    """Opens a page; in the end no console may have complained."""
    visitors, contexts = [], []

    def arrive(address: str, theme: str = "light", **context: Any) -> Visitor:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}, **context))
        visitors.append(Visitor(contexts[-1].new_page()))
        visitors[-1].open(address, theme)
        return visitors[-1]

    yield arrive
    complaints = [visitor.complaints for visitor in visitors]
    for one in contexts:
        one.close()
    assert not any(complaints), complaints
