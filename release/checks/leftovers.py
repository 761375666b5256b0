"""Checks of what is left over: files that belong to no release, and files that changed since the
build. They run late, so that a file that another finding tells of is not told of again."""

from flashmap.checkpoint import CONFIG, INDEX
from flashmap.vocabulary import FILE as DRAFT_VOCAB

from ..checking import ReleaseFolder, check
from ..contents import CARD, CUSTOM_GENERATE, EVAL, LICENCE, PICTURE, RECIPE, RECORD
from ..errors import ReleaseError
from ..grid_modes import grid_mode
from ..weights import weight_paths

HUB_FILES = {".gitattributes"}  # a Hub puts it into every repository
KNOWN = HUB_FILES | {CONFIG, INDEX, CARD, LICENCE, RECORD, RECIPE, PICTURE, DRAFT_VOCAB}
SUFFIXES = {EVAL: (".json", ".jsonl", ".txt"), CUSTOM_GENERATE: (".py", ".txt")}


@check("stray")
def stray(release: ReleaseFolder) -> str:
    """Files that no release has: a Hub shows them to everybody, and engines read what they find."""
    known = KNOWN | set(release.code) | {path.name for path in weight_paths(release.path)}
    found = [
        f"{name} ({row['kind']})" if "kind" in row else name
        for name, row in release.files.items()
        if name not in known | release.blamed and not _belongs(name)
    ]
    if found:
        names = [name.partition(" (")[0] for name in found]
        raise ReleaseError(
            "stray",
            ", ".join(found[:5]),
            "the files of a release and no others",
            "remove them, or build again",
            names,
        )
    return "none"


def _belongs(name: str) -> bool:
    folder, _, rest = name.partition("/")
    return "/" not in rest and rest.endswith(SUFFIXES.get(folder, ("\0",)))


def _require_true(release: ReleaseFolder) -> None:
    config, record = release.config, release.record
    wanted = {
        "code_digest": release.raw_config.get("code_digest"),
        "grid_mode": grid_mode(config.jump_grids, config.vocab_size),
    }
    wrong = [f"{name} {record.get(name)!r}" for name in wanted if record.get(name) != wanted[name]]
    if wrong and CONFIG not in release.blamed:
        raise ReleaseError(
            "record",
            f"{RECORD} with {' and '.join(wrong)}",
            f"what {CONFIG} says",
            "build again",
            [RECORD],
        )


@check("record")
def record(release: ReleaseFolder) -> str:
    """Every file as release.json lists it, and what it says of them."""
    _require_true(release)
    recorded = release.record["files"]
    found = {name: row for name, row in release.files.items() if name not in HUB_FILES | {RECORD}}
    known = release.blamed
    problems = {
        "changed since the build": [
            name for name in recorded.keys() & found.keys() if recorded[name] != found[name]
        ],
        "missing": list(recorded.keys() - found.keys()),
        "not recorded": list(found.keys() - recorded.keys()),
    }
    new = {what: sorted(set(names) - known) for what, names in problems.items()}
    texts = [f"{', '.join(names[:5])} {what}" for what, names in new.items() if names]
    if texts:
        raise ReleaseError(
            "record",
            "; ".join(texts),
            f"the files that {RECORD} lists",
            "build again",
            [name for names in new.values() for name in names],
        )
    told = len({name for names in problems.values() for name in names})
    return (
        f"{len(recorded)} files as they were built"
        if not told
        else (f"all as they were built but {told}, told of above")
    )
