"""A release's model card: generated parts from the configuration, the measurements and the recipe,
around what people wrote.

Run on a source (a models/ entry) or on a release folder. Keys of the front matter that people
wrote win over the generated ones.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmap.checkpoint import CONFIG
from flashmap.files import write_whole
from flashmap.references import HUB_ID
from flashmap.vocabulary import FILE as DRAFT_VOCAB

from .card_sections import SECTIONS, told_recipe
from .contents import (
    CARD,
    GENERATE,
    PICTURE,
    RECIPE,
    RECORD,
    read_config,
    read_file,
    read_json,
    read_record,
    refresh_record,
)
from .errors import ReleaseError
from .grid_modes import grid_mode
from .hub_metadata import LICENCES
from .markers import FENCE, METADATA, segments, split_front_matter, with_sections
from .measurements import Measurement, read_measurements
from .picture import data_digest, draw, stated_digest
from .weights import read_headers, weight_paths

if TYPE_CHECKING:
    from flashmap.modeling.configuration_flashmap import FlashMapConfig

LIBRARY = "flashmap"  # with "transformers" the Hub shows a pipeline() call that cannot work
TAGS = ("speculative-decoding", "draft-model", "flow-map", "custom_code")
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Facts:
    """What the generated parts of a card are made of.

    Attributes:
        config: the drafter's configuration.
        raw: config.json as written, with the keys that are not the drafter's own.
        num_parameters: over all tensors.
        num_bytes: of all tensors.
        grid_mode: see `grid_modes`.
        measurements: of eval/.
        recipe: of recipe.toml; empty if there is none.
        files: paths of the optional files that are there.
        repo_id: where the release goes; None if that is not known.
        tag: under which it goes there.
    """

    config: "FlashMapConfig"
    raw: Mapping[str, Any]
    num_parameters: int
    num_bytes: int
    grid_mode: str
    measurements: list[Measurement]
    recipe: Mapping[str, Any]
    files: frozenset[str]
    repo_id: str | None
    tag: str | None

    @classmethod
    def of(cls, folder: Path, record: Mapping[str, Any]) -> "Facts":
        """The facts of a release folder or a source; ``record`` is its release.json, or empty.

        Raises ReleaseError for what cannot be read.
        """
        config = read_config(folder)
        headers = [
            header for path in weight_paths(folder) for header in read_headers(path)[0].values()
        ]
        optional = (DRAFT_VOCAB, RECIPE, GENERATE, PICTURE)
        return cls(
            config,
            read_json(folder, CONFIG, "config"),
            sum(math.prod(shape) for shape, _ in headers),
            sum(math.prod(shape) * BYTES.get(dtype, 1) for shape, dtype in headers),
            grid_mode(config.jump_grids, config.vocab_size),
            read_measurements(folder),
            _read_recipe(folder),
            frozenset(name for name in optional if (folder / name).is_file()),
            record.get("repo_id"),
            record.get("tag"),
        )


def _read_recipe(folder: Path) -> dict[str, Any]:
    if not (folder / RECIPE).exists():
        return {}
    try:
        recipe = tomllib.loads(read_file(folder, RECIPE).decode())
        told_recipe(recipe)
        return recipe
    except (ValueError, TypeError, AttributeError) as error:
        raise ReleaseError(
            "eval",
            f"{RECIPE} unreadable ({error})",
            "a recipe that `flashmap train` reads",
            "restore it, or remove it",
            [RECIPE],
        ) from error


def read_card(content: bytes) -> str:
    """A card's text, its line ends as they are. Raises ReleaseError."""
    try:
        return content.decode("utf-8-sig")  # a mark before it would hide the front matter
    except UnicodeDecodeError as error:
        raise ReleaseError(
            "card-metadata", f"{CARD} is not UTF-8 ({error})", "text", "save it as UTF-8", [CARD]
        ) from error


def read_metadata(text: str, *, written: bool = False) -> dict[str, Any]:
    """The front matter's keys; with ``written`` only those that people wrote. Raises
    ReleaseError."""
    import yaml

    front, _ = split_front_matter(text)
    if written:
        front = "".join(part for name, part in segments(front) if name is None)
    try:
        found = yaml.safe_load(front.partition("\n")[2]) or {}
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ReleaseError(
            "card-metadata",
            f"{CARD}'s front matter unreadable ({' '.join(str(error).split())})",
            "YAML keys with values",
            "mend it by hand",
            [CARD],
        ) from error
    return found


def with_licence(text: str, licence: str) -> str:
    """The card `text` with a licence in its front matter.

    Raises ReleaseError for a licence that the Hub does not know, and if the card states another.
    """
    stated = read_metadata(text).get("license")
    if licence not in LICENCES or stated not in (None, licence):
        found = f"license {stated!r} in {CARD}, and {licence!r} asked for"
        raise ReleaseError(
            "card-metadata",
            found if stated else f"the licence {licence!r}",
            "one licence, by the name that the Hub has for it, such as mit or apache-2.0",
            "give another --license, or mend the card",
            [CARD],
        )
    if stated == licence:
        return text
    front, rest = split_front_matter(text)
    if not front:
        return f"{FENCE}\nlicense: {licence}\n{FENCE}\n\n{text}"
    opening, _, written = front.partition("\n")
    return f"{opening}\nlicense: {licence}\n{written}{rest}"


def render_card(content: bytes | None, facts: Facts) -> bytes:
    """The card with its generated parts made anew; ``content`` is the one there is.

    Raises ReleaseError for a card whose markers or front matter cannot be read.
    """
    text = _new_card(facts) if content is None else read_card(content)
    return with_sections(text, generated_sections(text, facts)).encode()


def generated_sections(text: str, facts: Facts) -> dict[str, str]:
    """The generated parts of the card ``text`` by name, those that there is something to say in."""
    written = read_metadata(text, written=True)
    found = {METADATA: _metadata(written, facts)}
    for name, section in SECTIONS.items():
        content = section(facts, str(written.get("license", "")))
        if content is not None:
            found[name] = content
    return found


def _metadata(written: Mapping[str, Any], facts: Facts) -> str:
    target = facts.config.target_model
    lines = {
        "library_name": f" {LIBRARY}",
        "pipeline_tag": " text-generation",
        **({"base_model": f" {target}"} if HUB_ID.fullmatch(target) else {}),
        "tags": "".join(f"\n- {tag}" for tag in TAGS),
    }
    return "".join(f"{key}:{value}\n" for key, value in lines.items() if key not in written)


def _new_card(facts: Facts) -> str:
    name = facts.config.target_model.rpartition("/")[2]
    return (
        f"# FlashMap drafter for {name}\n\n"
        "A drafter for lossless speculative decoding: it proposes "
        f"{facts.config.block_size} tokens at once, and\n{name} keeps the ones it agrees with. "
        "The text is the target's own.\n\n"
    )


@dataclass(frozen=True)
class Written:
    """What `write_card` did: the card's path, and the files that it changed."""

    card: Path
    changed: list[str]


def write_card(folder: Path, *, picture: bool = True) -> Written:
    """Make the generated parts of ``folder``'s card, and the picture, anew.

    Raises ReleaseError for what cannot be read; then nothing has changed.
    """
    if not folder.is_dir():
        raise ReleaseError(
            "folder", f"no folder {folder}", "a drafter's folder", "check the path", []
        )
    record = read_record(folder) if (folder / RECORD).exists() else {}
    changed = []
    path, measurements = folder / CARD, read_measurements(folder)
    before = read_file(folder, CARD) if path.exists() else None
    render_card(before, Facts.of(folder, record))  # raises what there is to raise
    if picture and not _is_current(folder / PICTURE, measurements):
        changed += [PICTURE] * draw(measurements, folder / PICTURE)
    content = render_card(before, Facts.of(folder, record))
    if content != before:
        write_whole(path, content)  # at no moment is what people wrote gone
        changed.append(CARD)
    if record:  # what was written by hand, or before a kill, counts too
        refresh_record(folder, {CARD, *changed})
    return Written(path, changed)


def _is_current(path: Path, measurements: list[Measurement]) -> bool:
    return path.is_file() and stated_digest(path.read_bytes()) == data_digest(measurements)
