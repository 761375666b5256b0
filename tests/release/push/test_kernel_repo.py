"""`release kernels`: a Hub kernel repository that the PyPI package `kernels` loads."""

import ast
import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from support.hub.client import remote_repo
from support.hub.server import LocalHub

from flashmap.kernels import fused_flashmap
from flashmap.release.errors import ReleaseError
from flashmap.release.hub import HubRepo
from flashmap.release.kernel_repo import VARIANT, kernel_files
from flashmap.release.plan import LocalFile, local_file
from flashmap.release.push import Mark, make_plan, push
from flashmap.release.verify import arrives, imports

ROOM = Path(__file__).resolve().parents[3] / "kernels"
KNOWS_KERNELS = hasattr(huggingface_hub.constants, "REPO_TYPES_WITH_KERNEL")
needs_client = pytest.mark.skipif(
    not KNOWS_KERNELS, reason=f"huggingface_hub {huggingface_hub.__version__} has no kernel type"
)


def content(files: dict[str, LocalFile], path: str) -> bytes:
    source = files[path].source
    return source if isinstance(source, bytes) else source.read_bytes()


def lay_out(files: dict[str, LocalFile], folder: Path) -> Path:
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content(files, path))
    return folder


def test_the_layout() -> None:
    files = kernel_files(ROOM, "ada/ops", 3)
    sources = {path.name for path in ROOM.glob("*.py")}
    assert files.keys() == {"README.md", "LICENSE"} | {
        f"build/torch-universal/{name}" for name in {"metadata.json", "__init__.py", *sources}
    }
    for name in sources:
        assert content(files, f"{VARIANT}/{name}") == (ROOM / name).read_bytes()
    metadata = json.loads(content(files, f"{VARIANT}/metadata.json"))
    assert (metadata["version"], metadata["license"]) == (3, "MIT")
    assert metadata["name"].isidentifier() and metadata["id"].isidentifier()
    assert 'get_kernel("ada/ops", version=3' in content(files, "README.md").decode()
    assert not (ROOM / "__init__.py").exists()


def test_every_import_of_the_package_is_relative() -> None:
    files = kernel_files(ROOM, "ada/ops", 1)
    tree = ast.parse(content(files, f"{VARIANT}/__init__.py"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert found and all(isinstance(node, ast.ImportFrom) and node.level == 1 for node in found)


def test_other_code_has_another_id(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('__all__ = ["x"]\nx = 1\n')
    first = kernel_files(tmp_path, "ada/ops", 1)
    assert kernel_files(tmp_path, "ada/ops", 1) == first
    (tmp_path / "a.py").write_text('__all__ = ["x"]\nx = 2\n')
    other = kernel_files(tmp_path, "ada/ops", 1)
    ids = [json.loads(content(f, f"{VARIANT}/metadata.json"))["id"] for f in (first, other)]
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    "line",
    ["import flashmap.kernels", "from flashmap.kernels import x", "from ..modeling import x"],
)
def test_a_module_that_needs_the_package_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"def f():\n    {line}\n")
    with pytest.raises(ReleaseError) as caught:
        kernel_files(tmp_path, "ada/ops", 1)
    assert line in caught.value.found and "a.py:2" in caught.value.found


@pytest.fixture
def kernels() -> Any:
    """The PyPI package of that name; from the repository root, our folder can be imported too."""
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the PyPI package kernels is not installed")
    return importlib.import_module("kernels")


def assert_ours(loaded: Any) -> None:
    """The loaded package offers our operations, and they compute the same."""
    assert sorted(loaded.__all__) == sorted(fused_flashmap.__all__)
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert loaded.rms_norm(x, weight, 1e-6).equal(fused_flashmap.rms_norm(x, weight, 1e-6))


def test_the_kernels_package_loads_the_folder(kernels: Any, tmp_path: Path) -> None:
    assert_ours(kernels.get_local_kernel(lay_out(kernel_files(ROOM, "ada/ops", 1), tmp_path)))


@needs_client
def test_the_kernels_package_loads_what_was_pushed(kernels: Any, hub: LocalHub) -> None:
    repo, mark = HubRepo("ada/ops", "kernel"), Mark("v2", moves=True)
    files = kernel_files(ROOM, "ada/ops", 2)
    push(repo, make_plan(repo, files, mark), message="Kernels", mark=mark)
    assert_ours(kernels.get_kernel("ada/ops", version=2, trust_remote_code=True))


@needs_client
def test_a_version_is_a_branch_that_follows_main(hub: LocalHub, waits: list[float]) -> None:
    repo, mark = HubRepo("ada/ops", "kernel"), Mark("v1", moves=True)
    files = kernel_files(ROOM, "ada/ops", 1)
    newer = files | {"README.md": local_file(b"---\nlicense: mit\n---\n")}
    for contents in (files, files, newer):
        plan = make_plan(repo, contents, mark)
        use = imports(repo, contents, VARIANT)  # takes seconds
        verify = use if contents is files else arrives(repo, contents)
        done = push(repo, plan, message="Kernels", mark=mark, verify=verify)
        assert done.changed is (not plan.empty)
        store, remote = hub.store, remote_repo(hub, "ada/ops", "kernel")
        assert store.files(remote) == store.files(remote, "v1")
        assert store.files(remote)["README.md"] == content(contents, "README.md")
        assert set(remote.refs) == {"refs/heads/main", "refs/heads/v1"}


@needs_client
def test_code_that_does_not_import_never_becomes_main(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('__all__ = ["x"]\n')
    files = kernel_files(tmp_path, "ada/ops", 1)
    repo, mark = HubRepo("ada/ops", "kernel"), Mark("v1", moves=True)
    with pytest.raises(ReleaseError, match="cannot import name 'x'"):
        push(
            repo,
            make_plan(repo, files, mark),
            message="Kernels",
            mark=mark,
            verify=imports(repo, files, VARIANT),
        )
    assert hub.store.files(remote_repo(hub, "ada/ops", "kernel")).keys() == {".gitattributes"}


@pytest.mark.skipif(KNOWS_KERNELS, reason="this huggingface_hub has the kernel type")
def test_an_older_client_says_what_is_needed() -> None:
    with pytest.raises(ReleaseError) as caught:
        HubRepo("ada/ops", "kernel")
    assert huggingface_hub.__version__ in caught.value.found and "2" in caught.value.expected
