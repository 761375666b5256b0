"""The Python files a release ships, as transformers' loader sees them: which they are, and their
digest.

The loader finds a file's siblings with a regular expression over its text and copies them into a
cache of modules. It may reuse a stale copy when only a sibling changed, so the digest of every
shipped file is stamped into the configuration file: any change then changes the file that the
loader looks at first.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from .contents import GENERATE, REQUIREMENTS, read_file
from .errors import ReleaseError

CONFIGURATION = "configuration_flashmap.py"
MODELING = "modeling_flashmap.py"
AUTO_MAP = {
    "AutoConfig": "configuration_flashmap.FlashMapConfig",
    "AutoModel": "modeling_flashmap.FlashMapDraftModel",
}
STAMP = re.compile(rb'^CODE_DIGEST = "[^"\r\n]*"(?=\r?$)', re.MULTILINE)
# The lines that a build writes: this one, and in custom_generate/ repository and tag.
STAMPS = re.compile(
    STAMP.pattern + rb'|^REPO_ID, TAG = "[^"\r\n]*", "[^"\r\n]*"(?=\r?$)', re.MULTILINE
)
REPO_LINE = re.compile(r'^REPO_ID, TAG = "", ""$', re.MULTILINE)
# What the loader takes for a relative import, wherever it stands in the text.
RELATIVE = re.compile(r"^\s*(?:from\s+\.(\S*)\s+import|import\s+\.(\S*)\s*$)", re.MULTILINE)
ONE_FILE_NAME = re.compile(r"[a-z0-9_]+")


def sibling_names(text: str, file: str) -> list[str]:
    """File names that ``text``, the code of ``file``, imports relatively, in order. Raises
    ReleaseError for other forms."""
    names = []
    for match in RELATIVE.finditer(text):
        name = match[1] if match[1] is not None else match[2]
        if not ONE_FILE_NAME.fullmatch(name):
            line = text[match.start() :].strip().partition("\n")[0]
            raise ReleaseError(
                "remote-code",
                f"{file} has the line {line!r}",
                "relative imports of single sibling files only, also in comments and docstrings",
                "write it as: from .sibling_flashmap import name",
                [file],
            )
        names.append(f"{name}.py")
    return names


def read_closure(folder: Path) -> dict[str, bytes]:
    """Name and content of every file the remote code consists of, names sorted.

    Starts at the two files that ``auto_map`` names and follows relative imports. Raises
    ReleaseError for a missing file, and for one that the modeling file does not name itself:
    transformers 4.57 copies only those.
    """
    files: dict[str, bytes] = {}
    wanted = [(MODELING, "auto_map"), (CONFIGURATION, "auto_map")]
    while wanted:
        name, needed_by = wanted.pop()
        if name in files:
            continue
        try:
            files[name] = read_file(folder, name)
        except ReleaseError as error:
            if error.check == "links":
                raise
            raise ReleaseError(
                "remote-code",
                f"no {folder / name}",
                f"the file that {needed_by} needs",
                "restore it, or remove the import",
                [name, needed_by],
            ) from error
        wanted += [(sibling, name) for sibling in sibling_names(_text(files[name], name), name)]
    named = {name: set(sibling_names(_text(text, name), name)) for name, text in files.items()}
    unnamed = sorted(files.keys() - named[MODELING] - {MODELING})
    if unnamed:
        raise ReleaseError(
            "remote-code",
            f"{', '.join(unnamed)}, which {MODELING} does not import itself",
            f"every shipped file named by a relative import in {MODELING}",
            "add the import: transformers 4.57 copies only what the entry file names",
            [MODELING, *unnamed, *(name for name in named if named[name] & set(unnamed))],
        )
    return dict(sorted(files.items()))


def _text(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReleaseError(
            "remote-code",
            f"{name} is not UTF-8 ({error})",
            "Python text",
            "restore the file",
            [name],
        ) from error


def code_digest(files: Mapping[str, bytes]) -> str:
    """sha256 over names and contents of the Python files among ``files``, sorted by name, with the
    lines that a build writes left out."""
    digest = hashlib.sha256()
    for name in sorted(name for name in files if name.endswith(".py")):
        digest.update(name.encode() + b"\0" + STAMPS.sub(b"", files[name]) + b"\0")
    return digest.hexdigest()


def read_stamp(configuration: bytes) -> str | None:
    """The digest that the configuration file carries; None unless it has exactly one stamp line."""
    lines: list[bytes] = STAMP.findall(configuration)
    return lines[0].split(b'"')[1].decode() if len(lines) == 1 else None


def stamped(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """``files`` with their digest in the configuration file. Raises ReleaseError if that has no
    stamp line."""
    if read_stamp(files[CONFIGURATION]) is None:
        raise ReleaseError(
            "code-digest",
            f"{CONFIGURATION} without exactly one stamp line",
            'one line CODE_DIGEST = "..."',
            f"restore the line in modeling/{CONFIGURATION}",
        )
    line = f'CODE_DIGEST = "{code_digest(files)}"'.encode()
    return {**files, CONFIGURATION: STAMP.sub(lambda _: line, files[CONFIGURATION])}


def custom_generate(repo_id: str | None, tag: str | None) -> dict[str, bytes]:
    """What ``target.generate(custom_generate=REPO)`` runs, told where its drafter is and under
    which tag, by path."""
    source = Path(__file__).with_name("custom_generate.py").read_text(encoding="utf-8")
    text, count = REPO_LINE.subn(
        lambda _: f"REPO_ID, TAG = {json.dumps(repo_id or '')}, {json.dumps(tag or '')}", source
    )
    assert count == 1, "custom_generate.py has one line for the build to write"
    return {GENERATE: text.encode(), REQUIREMENTS: b"torch>=2.9\ntransformers>=4.57\n"}
