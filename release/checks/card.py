"""Checks of the card and of what it says: metadata that a Hub takes, generated parts that are true,
links that lead somewhere."""

import posixpath
import re
from pathlib import PurePosixPath

from flashmap import __version__
from flashmap.checkpoint import CONFIG
from flashmap.vocabulary import FILE as DRAFT_VOCAB

from ..card import Facts, generated_sections, read_metadata
from ..checking import ReleaseFolder, check
from ..contents import CARD, CUSTOM_GENERATE, EVAL, LICENCE, PICTURE, RECIPE, read_file
from ..errors import ReleaseError
from ..hub_metadata import metadata_problems
from ..markers import METADATA, segments, split_front_matter
from ..measurements import read_measurements
from ..picture import require_current_picture

REQUIRED = (METADATA, "overview", "usage", "limits", "files", "terms")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# [text](link), [name]: link, <img src="link">
LINK = re.compile(
    r"""\]\(([^)\s#]+)[^)]*\)|^\[[^\]]+\]:\s+([^\s#]+)|<[^>]+\s(?:src|href)=["']([^"'#]+)""",
    re.MULTILINE,
)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//")
# Files that the generated parts state something of.
STATES = (CONFIG, RECIPE, PICTURE, DRAFT_VOCAB, EVAL, CUSTOM_GENERATE)
REWRITE = "run `flashmap release card DIR`"


@check("licence")
def licence(release: ReleaseFolder) -> str:
    """A licence that can be read."""
    text = read_file(release.path, LICENCE).decode("utf-8", "replace")
    if not re.search(r"licen[cs]e|permission", text, re.IGNORECASE) or "\ufffd" in text:
        raise ReleaseError(
            "licence", f"{LICENCE} without a licence's text", "the code's licence", "build again",
            [LICENCE],
        )  # fmt: skip
    return text.strip().partition("\n")[0]


@check("eval")
def measurements(release: ReleaseFolder) -> str:
    """Measurements that can be read, with the prompts they were made on."""
    found = read_measurements(release.path)
    lost = [m.name for m in found if m.prompts_file(release.path) is None]
    if lost:
        raise ReleaseError(
            "eval",
            f"no prompts beside {', '.join(lost)}",
            "the file of prompts that it names, in eval/",
            "put it beside the source's weights, and build again",
            [*lost, *(f"eval/{m.protocol['prompts']['file'].rpartition('/')[2]}" for m in found)],
        )
    return ", ".join(m.name for m in found) or "none"


@check("card-metadata")
def metadata(release: ReleaseFolder) -> str:
    """The front matter, as a Hub would check it."""
    data = read_metadata(release.card)
    problems = list(metadata_problems(data, release.config.target_model))
    if problems:
        raise ReleaseError(
            "card-metadata",
            "; ".join(problems[:4]),
            "metadata that a Hub takes and shows rightly",
            f"mend it by hand, then {REWRITE}",
            [CARD],
        )
    return f"{len(data)} keys, licence {data['license']}"


@check("card-sections")
def sections(release: ReleaseFolder) -> str:
    """The parts that every card has."""
    split_front_matter(release.card)  # without it, nothing below can be told
    found = {name for name, text in segments(release.card) if name and text.strip()}
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        raise ReleaseError(
            "card-sections", f"{CARD} without {', '.join(missing)}", "every part", REWRITE, [CARD]
        )
    return f"{len(found)} generated parts"


@check("card-links")
def links(release: ReleaseFolder) -> str:
    """Links and pictures of the card that lie in the folder."""
    found = map("".join, LINK.findall(FENCED.sub("", release.card)))
    wanted = [link for link in found if not ELSEWHERE.match(link)]
    there = {place for name in release.files for place in (name, *_folders(name))}
    lost = sorted({link for link in wanted if posixpath.normpath(link) not in there})
    if lost:
        raise ReleaseError(
            "card-links",
            f"{CARD} points at {', '.join(lost[:5])}, not there",
            "files of the folder, or whole addresses",
            "restore them, or mend the links",
            [CARD, *lost],
        )
    return f"{len(wanted)} within the folder"


def _folders(name: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(name).parents]


@check("picture")
def picture(release: ReleaseFolder) -> str:
    """Acceptance by slot, drawn from these measurements."""
    if PICTURE not in release.files:
        return "none"
    found = read_measurements(release.path)
    release.require_as_built(measured.name for measured in found)
    require_current_picture(read_file(release.path, PICTURE), found)
    return PICTURE


@check("card-current", needs=["card", "code", "configuration", "weights"])
def current(release: ReleaseFolder) -> str:
    """Generated parts that say what configuration and measurements say."""
    built_by = release.record.get("versions", {}).get("flashmap")
    if built_by != __version__:
        return f"built by flashmap {built_by}, not compared by {__version__}"
    files = {*release.files, *release.record["files"]}
    release.require_as_built(name for name in files if name.startswith(STATES))
    wanted = generated_sections(release.card, Facts.of(release.path, release.record))
    found = dict(segments(release.card))
    stale = [name for name, text in wanted.items() if found.get(name, "").strip() != text.strip()]
    if stale:
        raise ReleaseError(
            "card-current",
            f"{CARD} whose {', '.join(stale)} differ from what configuration and eval/ say",
            "the card of this release",
            REWRITE,
            [CARD],
        )
    return f"{len(wanted)} parts"
