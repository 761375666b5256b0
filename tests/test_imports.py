"""Who may import whom; `import flashmap` stays cheap and still registers with transformers."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashmap

ROOT = Path(__file__).resolve().parents[1]
STDLIB = sys.stdlib_module_names

# Room -> (what it may import of flashmap, what it may import of others; None: anything but an
# engine).
DIRECTIONS: dict[str, tuple[set[str], set[str] | None]] = {
    "modeling": ({"flashmap.modeling"}, {"torch", "transformers", "triton"}),
    "kernels": ({"flashmap.kernels"}, {"torch", "triton"}),
    "release": (
        {
            "flashmap.release",
            "flashmap.modeling",
            "flashmap.pair",
            "flashmap.checkpoint",
            "flashmap.embedded",
            "flashmap.files",
            "flashmap.json_lines",
            "flashmap.loops",
            "flashmap.machine",
            "flashmap.manifest",
            "flashmap.openmp",
            "flashmap.prompts",
            "flashmap.references",
            "flashmap.schedule",
            "flashmap.vocabulary",
            "flashmap.load_pair",
            "flashmap.__version__",
        },
        None,
    ),
    "training": (
        {
            "flashmap.training",
            "flashmap.modeling",
            "flashmap.kernels",
            "flashmap.files",
            "flashmap.json_lines",
            "flashmap.loops",
            "flashmap.machine",
            "flashmap.pair",
            "flashmap.prompts",
            "flashmap.quiet",
            "flashmap.schedule",
            "flashmap.vocabulary",
        },
        None,
    ),
    "serving": (
        {
            "flashmap.serving",
            "flashmap.modeling",
            "flashmap.kernels",
            "flashmap.release.foreign",
            "flashmap.release.tables",
            "flashmap.vocabulary",
        },
        {"torch", "transformers"},
    ),
    "cli": ({"flashmap"}, None),
    "space": ({"flashmap.load_pair"}, None),
}
# The package's own modules, src/flashmap/*.py, stand between the rooms they offer and the rooms
# that use them.
PACKAGE = {"flashmap.modeling"} | {
    f"flashmap.{path.stem}" for path in (ROOT / "src/flashmap").glob("*.py")
}
ENGINES = {"vllm", "sglang"}
# The folders that may import an engine: each its own.
PLUGINS = {f"flashmap.serving.{engine}_plugin": engine for engine in ENGINES}


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module of `package` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def violations(source: str, package: str, own: set[str], others: set[str] | None) -> list[str]:
    """What a module of `package` imports against the direction, one line of text each."""
    found = []
    for line, name in imports(source, package):
        root = name.split(".")[0]
        if root == "flashmap":
            allowed = any(name == prefix or name.startswith(prefix + ".") for prefix in own)
        elif others is None:
            allowed = root not in ENGINES
        else:
            allowed = root in STDLIB or root in others or root == PLUGINS.get(package)
        if not allowed:
            found.append(f"line {line}: {name}")
    return found


@pytest.mark.parametrize("room", DIRECTIONS)
def test_rooms_import_downwards(room: str) -> None:
    own, others = DIRECTIONS[room]
    for path in sorted((ROOT / room).rglob("*.py")):
        folder = path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        found = violations(path.read_text(), f"flashmap.{folder}", own, others)
        assert not found, f"{path.relative_to(ROOT)} imports against the direction: {found}"


def test_package_modules_import_downwards() -> None:
    for path in sorted((ROOT / "src/flashmap").glob("*.py")):
        found = violations(path.read_text(), "flashmap", PACKAGE, None)
        assert not found, f"{path.relative_to(ROOT)} imports against the direction: {found}"


def test_every_room_has_a_direction() -> None:
    rooms = {path.name for path in (ROOT / "src/flashmap").iterdir() if path.is_dir()}
    # The Space is no part of the package: it may use what any program may.
    assert rooms - {"__pycache__"} | {"space"} == set(DIRECTIONS)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("modeling", "import numpy"),
        ("modeling", "from ..release import build"),
        ("modeling", "from flashmap.pair import load_pair"),
        ("kernels", "from flashmap.modeling.decoding_flashmap import spec_generate"),
        ("kernels", "def f():\n    import transformers"),
        ("release", "from flashmap.cli.main import app"),
        ("release", "import flashmap.cli"),
        ("cli", "import vllm"),
        ("serving", "import vllm"),
        ("serving.sglang_plugin", "import vllm"),
        ("serving", "from flashmap.release.build import build"),
    ],
)
def test_an_upward_import_is_found(room: str, source: str) -> None:
    assert violations(source, f"flashmap.{room}", *DIRECTIONS[room.split(".")[0]])


def fresh(code: str, *, cwd: Path = ROOT) -> str:
    """What `code` prints in a new interpreter that finds the package as this one does."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=cwd, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "triton", "gradio", "vllm", "sglang", "numpy", "typer"]
    code = f"import sys, flashmap; print([name for name in {heavy} if name in sys.modules])"
    assert fresh(code).strip() == "[]"


def test_import_is_fast() -> None:
    # Own time inside a running interpreter, best of five: a busy machine slows some of them, not
    # all.
    code = "import time; t = time.perf_counter(); import flashmap; print(time.perf_counter() - t)"
    assert min(float(fresh(code)) for _ in range(5)) < 0.25


# Each way of arriving at the Auto classes, before and after flashmap.
ORDERS = {
    "flashmap first": "import flashmap\nfrom transformers import AutoConfig, AutoModel",
    "transformers first": "from transformers import AutoConfig, AutoModel\nimport flashmap",
    "half of transformers first": "from transformers import AutoConfig\nimport flashmap\n"
    "from transformers import AutoModel",
    "model class first": "import flashmap\nflashmap.FlashMapDraftModel\n"
    "from transformers import AutoConfig, AutoModel",
    "another model first": "import flashmap\nfrom transformers import LlamaForCausalLM\n"
    "from transformers import AutoConfig, AutoModel",
    "twice": "import flashmap, importlib\nimportlib.reload(flashmap)\n"
    "from transformers import AutoConfig, AutoModel\nimportlib.reload(flashmap)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny drafter's folder that ships no code, so that loading it needs the registration."""
    path = tmp_path_factory.mktemp("drafter")
    config = flashmap.FlashMapConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        cond_dim=8,
        time_embed_dim=8,
        target_hidden_size=8,
        target_layer_ids=[0],
    )
    flashmap.FlashMapDraftModel(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_know_the_drafter(order: str, folder: Path) -> None:
    code = f"""{ORDERS[order]}
import sys
config = AutoConfig.from_pretrained({str(folder)!r})
assert type(config) is flashmap.FlashMapConfig, type(config)
model = AutoModel.from_pretrained({str(folder)!r})
assert type(model) is flashmap.FlashMapDraftModel, type(model)
left = [finder for finder in sys.meta_path if type(finder).__module__.startswith("flashmap")]
assert not left, left
"""
    fresh(code, cwd=folder)
