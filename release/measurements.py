"""The measurements that a release ships: documents of `flashmap train eval --json` (acceptance) and
of `flashmap bench --json` (speed), the one source of the card's numbers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contents import EVAL, GOLDEN, read_json
from .errors import ReleaseError

ACCEPTANCE, SPEED = "acceptance", "speed"


@dataclass(frozen=True)
class Row:
    """Acceptance over the texts of a domain; lengths are tokens a pass of the target, and
    ``slots`` the share of each slot's drafts that was kept where the slot was reached."""

    domain: str
    texts: int
    looped: int
    acceptance_length: float | None
    without_looped: float | None
    slots: list[float | None]


@dataclass(frozen=True)
class Setting:
    """Acceptance at one temperature, number of jumps and of noise draws; ``rows`` by domain."""

    temperature: float
    num_steps: int
    num_draws: int
    rows: list[Row]
    overall: Row


@dataclass(frozen=True)
class Measurement:
    """One file of measurements.

    Attributes:
        name: its path in the release.
        content: its bytes.
        document: what they hold.
        kind: "acceptance" or "speed".
        settings: what an acceptance document measured; empty for speed.
    """

    name: str
    content: bytes
    document: dict[str, Any]
    kind: str
    settings: list[Setting]

    @property
    def protocol(self) -> dict[str, Any]:
        """Where and how it was measured: a document of speed has its own table for that."""
        found: dict[str, Any] = self.document.get("protocol", self.document)
        return found

    def prompts_file(self, folder: Path) -> Path | None:
        """The file of prompts, if it lies in ``folder`` or its eval/."""
        name = Path(self.protocol["prompts"]["file"]).name
        places = (folder / EVAL / name, folder / name)
        return next((path for path in places if path.is_file()), None)


def read_measurements(folder: Path) -> list[Measurement]:
    """The measurements in ``folder``/eval, by name. Raises ReleaseError for one that is none."""
    names = sorted(f"{EVAL}/{path.name}" for path in (folder / EVAL).glob("*.json"))
    return [_read(folder, name) for name in names if name != GOLDEN]


def _read(folder: Path, name: str) -> Measurement:
    document = read_json(folder, name, "eval")
    content = (folder / name).read_bytes()
    try:
        protocol = document.get("protocol", document)
        str(protocol["prompts"]["file"])
        int(protocol["prompts"]["count"])
        dict(protocol.get("versions", {}))
        if "walk" in document:
            int(protocol["settings"]["max_new_tokens"])
            settings = [_setting(row) for row in document.get("loop") or document["walk"]]
            if len({tuple(row.domain for row in setting.rows) for setting in settings}) != 1:
                raise ValueError("settings have to be of the same domains")
            return Measurement(name, content, document, ACCEPTANCE, settings)
        for row in (*document["rows"], document["overall"]):
            str(row["domain"])
            _numbers(row, "prompts", "speedup", "tokens_per_second", "plain_tokens_per_second")
        float(protocol.get("temperature", 0))
        return Measurement(name, content, document, SPEED, [])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReleaseError(
            "eval",
            f"{folder / name} is no measurement ({type(error).__name__}: {error})",
            "what `flashmap train eval --json` or `flashmap bench --json` printed",
            "measure again, or remove the file",
            [name],
        ) from error


def _setting(row: Mapping[str, Any]) -> Setting:
    return Setting(
        float(row["temperature"]),
        int(row["num_steps"]),
        int(row["num_draws"]),
        [_row(part) for part in row["domains"]],
        _row(row["overall"]),
    )


def _row(part: Mapping[str, Any]) -> Row:
    def optional(value: Any) -> float | None:
        return None if value is None else float(value)

    return Row(
        str(part["domain"]),
        int(part["texts"]),
        int(part["looped"]),
        optional(part["acceptance_length"]),
        optional(part["acceptance_length_without_looped"]),
        [optional(share) for share in part["slots"]],
    )


def _numbers(row: Mapping[str, Any], *names: str) -> None:
    for name in names:
        float(row[name])


def slots_digest(measurements: list[Measurement]) -> str:
    """What a picture of acceptance by slot has to be drawn anew for, as text."""
    shown = [
        (setting.temperature, setting.num_steps, setting.num_draws, setting.overall.slots)
        for measured in measurements
        for setting in measured.settings
    ]
    return json.dumps(shown)
