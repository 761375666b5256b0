"""The page with the embedded pair: how soon it answers, and how it looks.

`--screenshots FOLDER` (SHOTS of `make test-browser`) keeps the pictures; README's docs/space.png is
desktop.png.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import pair_folders
from support.space_pairs import served
from support.visitor import Visitor

from pair import DRAFT, EMBEDDED, PINS, TARGET, load
from race import encode, warm_up

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
MOST_WAIT_S = 2.0  # from the button to the first token, the prompt's own pass apart
MOST_BYTES = 200_000  # of a picture for README


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    pair = load(EMBEDDED)
    warm_up(pair, encode(pair, "Why?"))
    with served(pair) as found:
        yield found


@pytest.fixture
def shots(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = Path(request.config.getoption("--screenshots") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_the_first_token_comes_soon(address: str, visit: Callable[..., Visitor]) -> None:
    visitor, waits = visit(address), []
    for _ in range(3):  # the first one also fetches what the browser has not yet
        began = time.perf_counter()
        visitor.tab.click("#start")
        visitor.tab.wait_for_selector("#text-flashmap .round, #text-plain .prose:not(:empty)")
        wait = time.perf_counter() - began
        visitor.wait_for_tokens()
        visitor.tab.click("#stop")
        visitor.wait_for_end()
        tip = visitor.tab.locator("#text-flashmap .round").first.get_attribute("data-tip")
        waits.append(wait - int(re.findall(r"(\d+) ms", str(tip))[0]) / 1e3)
    assert min(waits) < MOST_WAIT_S, waits


@pytest.mark.parametrize(
    ("name", "theme", "width"),
    [("desktop", "light", 1120), ("dark", "dark", 1120), ("phone", "light", 390)],
)
def test_how_it_looks(
    name: str, theme: str, width: int,
    address: str, visit: Callable[..., Visitor], shots: Path,
) -> None:  # fmt: skip
    visitor = visit(address, theme)
    visitor.tab.set_viewport_size({"width": width, "height": 844})
    visitor.open_settings()
    visitor.slide("New tokens", 64)
    visitor.open_settings()
    visitor.tab.get_by_role("button", name="Python").click()
    visitor.start()
    visitor.wait_until(lambda: visitor.tokens("flashmap") > 12)
    visitor.tab.screenshot(path=shots / f"{name}-running.png", full_page=True)
    assert "texts" in visitor.wait_for_end()
    assert visitor.text("flashmap").startswith(visitor.text("plain")[:20])
    visitor.tab.locator("#text-flashmap .round").nth(4).hover()
    picture = shots / f"{name}.png"
    visitor.tab.screenshot(path=picture, full_page=True)
    assert 10_000 < picture.stat().st_size < MOST_BYTES
    widths = visitor.tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1]  # nothing has to be scrolled sideways
    dark = visitor.tab.evaluate("document.body.classList.contains('dark')")
    assert dark is (theme == "dark")


def test_the_command_serves_what_the_variables_name(tmp_path: Path) -> None:
    # And the card's example for programs runs against it.
    target = pair_folders.write_target(tmp_path / "target")
    draft = pair_folders.write_drafter(tmp_path / "draft")
    environment = {**os.environ, DRAFT: str(draft), TARGET: str(target)}
    (example,) = re.findall(
        r"```python\n(.*?)```", (PINS.parent / "README.md").read_text(), re.DOTALL
    )
    with subprocess.Popen(
        [sys.executable, "-u", "space/app.py"], cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            url = next(found[0] for line in lines if (found := re.findall(r"http://\S+", line)))
            script = example.replace("http://127.0.0.1:7860", url)
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    assert re.search(r" \d+\.\d+ True$", done.stdout.strip())
