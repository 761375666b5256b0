"""Where a model named by the user lies: turns a REF into a folder on this disk.

A REF is the alias of the embedded pair, a local folder, or a Hub id with an optional ``@revision``.
Everything after this module works on folders, so a half-finished download and a half-copied folder
meet the same checks.
"""

import re
from pathlib import Path

EMBEDDED = "smollm2-135m"
# A name, or owner/name; what starts like a path is meant as one.
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?", re.ASCII)
# Weights in safetensors only, and no Python: nothing that a REF names is ever executed.
WEIGHTS = "*.safetensors"
WANTED = [WEIGHTS, "*.json", "*.jinja", "*.txt", "*.model"]
UNWANTED = ["original/*", "consolidated*", "eval/*"]


def checkout_root() -> Path | None:
    """Root of the source checkout that this package runs from; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "modeling").is_dir() else None


def target_folder(ref: str, *, weights: bool = True) -> Path:
    """Folder of the target that ``ref`` names; fetches what is not on this disk, without its
    ``weights`` if they are not needed. Raises ValueError if it cannot."""
    if ref == EMBEDDED:
        from .embedded import embedded_target

        return embedded_target()
    return _folder(ref, "target", weights=weights)


def drafter_folder(ref: str) -> Path:
    """Folder of the drafter that ``ref`` names; fetches what is not on this disk. Raises ValueError
    if it cannot."""
    if ref != EMBEDDED:
        return _folder(ref, "drafter")
    root = checkout_root()
    if root is None:
        raise ValueError(
            f"drafter {ref!r}: its weights lie in models/{ref}/ of the project's repository, and "
            f"this flashmap is "
            "installed from a package; run from a clone of the repository (pip install -e .), or "
            "name a Hub id or folder"
        )
    folder = root / "models" / ref
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"drafter {ref!r}: {folder} holds no config.json; restore it with: git checkout "
            f"models/{ref}"
        )
    return folder


def _folder(ref: str, role: str, *, weights: bool = True) -> Path:
    try:
        path = Path(ref).expanduser()
    except RuntimeError as error:  # no home folder of that name
        raise ValueError(
            f"{role} {ref!r}: {str(error).rstrip('.')}; write the folder's path out"
        ) from error
    if ref and path.is_dir():
        return path
    if ref and path.exists():
        raise ValueError(
            f"{role} {ref!r} is a file; name the folder that holds config.json and the weights"
        )
    repo_id, at, revision = ref.partition("@")
    if not HUB_ID.fullmatch(repo_id) or (at and not revision):
        raise ValueError(
            f"{role} {ref!r}: there is no folder {path.absolute()}, and it is not a Hub id "
            f"either. Name an existing "
            f"folder, a Hub id such as owner/name or owner/name@revision, or {EMBEDDED}"
        )
    wanted = WANTED if weights else [pattern for pattern in WANTED if pattern != WEIGHTS]
    return _download(repo_id, revision or None, role, wanted)


def _download(repo_id: str, revision: str | None, role: str, wanted: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    asked = f"{role} {repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    nearby = f"There is no local folder {repo_id!r} either; if you meant a folder, check its path"
    try:
        return Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED
            )
        )
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{asked}: the Hub asks you to accept its terms; do so there, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{asked}: the Hub has no such model, or it is private (then run `hf auth login`). "
            f"{nearby}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{asked}: the Hub has the model, but no such branch, tag or commit"
        ) from error
    except errors.HFValidationError as error:
        raise ValueError(f"{asked} is neither a folder nor a valid Hub id: {error}") from error
    except (errors.HfHubHTTPError, OSError) as error:
        # Also what an offline machine and HF_HUB_OFFLINE=1 end in when the cache lacks the model.
        raise ValueError(
            f"{asked}: it is not in the local cache, and the Hub could not be reached "
            f"({type(error).__name__}). Go "
            f"online (and unset HF_HUB_OFFLINE) once to fetch it. {nearby}"
        ) from error
