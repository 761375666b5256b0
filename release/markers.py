"""Generated parts of a text that people write too: each lies between two marker lines, and
everything else is kept byte for byte.

A marker is an HTML comment, or a YAML comment for the one in the front matter:

    <!-- flashmap:begin NAME -->          # flashmap:begin metadata
    <!-- flashmap:end NAME -->            # flashmap:end metadata
"""

import re
from collections.abc import Mapping

from .contents import CARD
from .errors import ReleaseError

METADATA = "metadata"
MARKER = re.compile(r"(?:<!-- flashmap:(begin|end) ([\w-]+) -->|# flashmap:(begin|end) (metadata))")
FENCE = "---"

Segment = tuple[str | None, str]  # a generated part's name, or None for what people wrote; its text


def segments(text: str) -> list[Segment]:
    """``text`` in order: written parts, and generated parts without their marker lines.

    Raises ReleaseError for markers that do not come in pairs.
    """
    found: list[Segment] = []
    name, part = None, ""
    for line in text.splitlines(keepends=True):
        match = MARKER.fullmatch(line.strip())
        if match is None:
            part += line
            continue
        verb, named = match[1] or match[3], match[2] or match[4]
        if (verb == "begin") == (name is not None) or (verb == "end" and named != name):
            raise _unpaired(f"{verb} {named} after {f'begin {name}' if name else 'no begin'}")
        if verb == "begin" and any(other == named for other, _ in found):
            raise _unpaired(f"two parts named {named}")
        found.append((name, part))
        name, part = (named, "") if verb == "begin" else (None, "")
    if name is not None:
        raise _unpaired(f"begin {name} without its end")
    return [segment for segment in (*found, (None, part)) if segment != (None, "")]


def _unpaired(found: str) -> ReleaseError:
    return ReleaseError(
        "card-sections",
        f"{CARD} with the markers: {found}",
        "each flashmap:begin NAME followed by its flashmap:end NAME, once",
        "mend the marker lines by hand",
        [CARD],
    )


def with_sections(text: str, sections: Mapping[str, str]) -> str:
    """``text`` with these parts put in the place of those of the same name; a new one goes after
    the one it follows in ``sections``, with a blank line between, the metadata into the front
    matter.

    Raises ReleaseError as `segments`.
    """
    parts = segments(_with_front_matter(text) if METADATA in sections else text)
    for index, (name, content) in enumerate(sections.items()):
        here = next((i for i, part in enumerate(parts) if part[0] == name), None)
        if here is not None:
            parts[here] = (name, content)
            continue
        earlier = list(sections)[:index]
        after = max((i for i, part in enumerate(parts) if part[0] in earlier), default=-1)
        place = len(parts) if after < 0 or parts[after][0] == METADATA else after + 1
        before = parts[place - 1][1] if place else "\n"
        parts[place:place] = [(None, "\n" if before.endswith("\n") else "\n\n"), (name, content)]
    return "".join(_marked(name, content) for name, content in parts)


def _with_front_matter(text: str) -> str:
    """``text`` with an empty metadata part in its front matter, if that has none yet."""
    empty = _marked(METADATA, "")
    if not text.startswith((f"{FENCE}\n", f"{FENCE}\r\n")):
        return f"{FENCE}\n{empty}{FENCE}\n\n{text}"
    front, rest = split_front_matter(text)
    if any(name == METADATA for name, _ in segments(front)):
        return text
    opening, _, written = front.partition("\n")
    return f"{opening}\n{written}{empty}{rest}"


def split_front_matter(text: str) -> tuple[str, str]:
    """The front matter with its opening fence, and the text from its closing fence on; the first
    is empty if there is none."""
    lines = text.splitlines(keepends=True)
    if not lines or lines[0].rstrip() != FENCE:
        return "", text
    for number, line in enumerate(lines[1:], 1):
        if line.rstrip() == FENCE:
            return "".join(lines[:number]), "".join(lines[number:])
    raise ReleaseError(
        "card-metadata",
        f"{CARD} whose front matter does not end",
        f"a line {FENCE} after the metadata",
        "add it",
        [CARD],
    )


def _marked(name: str | None, content: str) -> str:
    if name is None:
        return content
    if name == METADATA:
        return f"# flashmap:begin {name}\n{content}# flashmap:end {name}\n"
    separated = content if content.endswith("\n") or not content else f"{content}\n"
    return f"<!-- flashmap:begin {name} -->\n{separated}<!-- flashmap:end {name} -->\n"
