"""The Space's card and requirements: what the Hub reads, and that it is what was tested."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pair import DRAFT, HUB, TARGET

ROOT = Path(__file__).resolve().parents[2]
SPACE = ROOT / "space"
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


def pins(path: Path) -> dict[str, str]:
    """Versions by name of the lines name==version."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


TESTED = pins(ROOT / "constraints/space.txt")


@pytest.fixture(scope="module")
def card() -> tuple[dict[str, Any], str]:
    _, front, text = (SPACE / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_front_matter_is_what_the_hub_takes(card: tuple[dict[str, Any], str]) -> None:
    front, _ = card
    assert front["sdk"] == "gradio" and front["sdk_version"] == TESTED["gradio"]
    assert re.fullmatch(r"3\.\d+", front["python_version"])
    assert (SPACE / front["app_file"]).is_file()
    assert {front["colorFrom"], front["colorTo"]} <= COLOURS
    assert len(front["short_description"]) <= 60 and front["title"] and front["emoji"]
    assert front["license"] == "mit" and front["suggested_hardware"] == "zero-a10g"
    assert front["models"] == list(HUB)


def test_what_is_pinned_is_what_is_tested() -> None:
    lines = (SPACE / "requirements.txt").read_text().splitlines()
    pinned = pins(SPACE / "requirements.txt")
    assert len(pinned) == sum(not line.startswith("#") for line in lines)
    assert {"spaces", "transformers"} <= pinned.keys()
    assert pinned == {name: TESTED[name] for name in pinned}


def test_the_card_names_the_variables_and_every_file(card: tuple[dict[str, Any], str]) -> None:
    _, text = card
    assert f"`{DRAFT}`" in text and f"`{TARGET}`" in text
    files = [path.name for path in SPACE.iterdir() if path.suffix in {".py", ".css"}]
    assert files and all(f"`{name}`" in text for name in files)
