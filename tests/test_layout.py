"""The layout that CONTRIBUTING describes, checked: rooms, remote code, sizes, docstrings."""

import ast
import json
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
ROOMS = {
    name.removeprefix("flashmap."): folder
    for name, folder in SETUPTOOLS["package-dir"].items()
    if name.count(".") == 1
}
REMOTE_CODE = sorted((ROOT / "modeling").glob("*"))
OTHER_CODE = ("src/flashmap", "space", "tests", "benchmarks", "models", ".ci")
MAX_LINES, WISHED_LINES = 500, 400
MAX_FUNCTION, MAX_KERNEL = 60, 80

# Who may read the environment, and for what. A drafter's knob never comes from here.
READS_ENVIRONMENT = {
    "src/flashmap/embedded.py": "the user's cache folder",
    "release/fresh.py": "what a fresh process inherits",
    "serving/options.py": "DraftOptions: an engine's workers inherit nothing else",
    "cli/main.py": "how OpenMP's threads wait, before torch is imported",
    "space/app.py": "which pair a Space shows",
}


def sources(*folders: str) -> list[Path]:
    """Python files of these folders of the repository, not following the rooms' symlinks."""
    found = []
    for folder in folders:
        pattern = "*.py" if folder == "src/flashmap" else "**/*.py"
        found += [path for path in (ROOT / folder).glob(pattern) if "__pycache__" not in str(path)]
    return sorted(found)


SHIPPED = sources("src/flashmap", "space", *ROOMS.values())
ALL = sources(*OTHER_CODE, *ROOMS.values())
Check = Callable[[str], list[str]]


def report(check: Check, paths: list[Path]) -> None:
    """Fail with every finding of `check` in these files, as file:line: what."""
    findings = [
        f"{path.relative_to(ROOT)}:{finding}"
        for path in paths
        for finding in check(path.read_text())
    ]
    assert not findings, "\n".join(findings)


# --- rooms


def test_package_table_and_symlinks_agree() -> None:
    links = {path.name: path for path in (ROOT / "src/flashmap").iterdir() if path.is_symlink()}
    licence = links.pop("LICENSE")
    assert licence.readlink() == Path("../../LICENSE")
    assert links.keys() == ROOMS.keys()
    for room, link in links.items():
        assert link.readlink() == Path("../..") / ROOMS[room], f"{link} must be a relative symlink"
        assert (ROOT / ROOMS[room]).is_dir(), f"{link} points at nothing"


def test_packages_list_names_every_folder_with_modules() -> None:
    expected = {"flashmap"}
    for room, folder in ROOMS.items():
        for path in sources(folder):
            below = path.parent.relative_to(ROOT / folder).parts
            expected.add(".".join(("flashmap", room, *below)))
    assert set(SETUPTOOLS["packages"]) == expected | {f"flashmap.{room}" for room in ROOMS}


def test_no_room_is_a_top_level_package() -> None:
    # `import kernels` from the repository root has to find the PyPI package that transformers
    # imports; with an __init__.py the folder would win over it. A folder without one is only found
    # when nothing else has the name.
    found = [folder for folder in ROOMS.values() if (ROOT / folder / "__init__.py").exists()]
    assert not found, f"{found}: a folder at the top of the repository holds no __init__.py"


def test_engine_folders_carry_the_suffix() -> None:
    engines = {"vllm", "sglang", "gradio", "triton", "torch", "transformers"}
    found = [
        path for folder in ROOMS.values() for path in (ROOT / folder).rglob("*") if path.is_dir()
    ]
    found += [path for path in ROOT.iterdir() if path.is_dir()]
    shadowing = [str(path.relative_to(ROOT)) for path in found if path.name in engines]
    assert not shadowing, f"{shadowing} would hide the package: call it <engine>_plugin"


def test_transformers_imports_from_the_repository_root() -> None:
    code = """import json, sys
sys.path.insert(0, "")
import transformers
from transformers import AutoModel, PreTrainedModel
try:
    import kernels
except ImportError:
    kernels = None
print(json.dumps(getattr(kernels, "__file__", None)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    origin = json.loads(done.stdout.strip().splitlines()[-1])
    assert origin is None or not Path(origin).is_relative_to(ROOT / "kernels")


# --- remote code: transformers finds a file's siblings by a regular expression over its text


RELATIVE = re.compile(r"^[ \t]*#?[ \t]*(?:from|import)[ \t]+\.", re.MULTILINE)
OPTIONAL = {"triton"}


def remote_code_findings(text: str) -> list[str]:
    """Breaches of the rules for a file that a release ships."""
    tree = ast.parse(text)
    found, lines = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            lines.add(node.lineno)
            if node not in tree.body:
                found.append(f"{node.lineno}: a relative import stands at the top of the file")
            if node.level > 1 or not re.fullmatch(r"[a-z0-9]+_flashmap", node.module or ""):
                found.append(f"{node.lineno}: only `from .sibling_flashmap import name`")
    for match in RELATIVE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if line not in lines:
            found.append(f"{line}: the loader takes this line of text for a relative import")
    return found + foreign_imports(tree)


def foreign_imports(tree: ast.Module) -> list[str]:
    """Absolute imports that may be missing, unless optional and in a module-level try."""
    tried = {child for node in tree.body if isinstance(node, ast.Try) for child in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for root in {name.split(".")[0] for name in names}:
            allowed = root in sys.stdlib_module_names or root in {"torch", "transformers"}
            if not allowed and not (root in OPTIONAL and node in tried):
                found.append(f"{node.lineno}: {root} may be missing where this file is loaded")
    return found


def test_remote_code_follows_the_rules() -> None:
    report(remote_code_findings, [path for path in REMOTE_CODE if path.suffix == ".py"])


def test_remote_code_is_flat() -> None:
    for path in REMOTE_CODE:
        if path.name in {"__pycache__", "README.md"}:
            continue
        assert path.is_file(), f"{path}: a release is flat"
        assert re.fullmatch(r"[a-z0-9]+_flashmap\.py", path.name), path
        if path.is_symlink():
            assert path.readlink() == Path("../kernels") / path.name, path


def test_model_file_names_every_sibling() -> None:
    # The oldest supported transformers copies only the files that the entry file itself names.
    tree = ast.parse((ROOT / "modeling/modeling_flashmap.py").read_text())
    named = {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.level}
    shipped = {path.stem for path in REMOTE_CODE if path.suffix == ".py"} - {"modeling_flashmap"}
    assert shipped - named == set(), "name these with a top-level import in modeling_flashmap.py"
    assert named - shipped == set(), "modeling_flashmap.py imports siblings that do not exist"


@pytest.mark.parametrize(
    "text",
    [
        "from . import fused_flashmap",
        "from .. import x",
        "from .a.b_flashmap import x",
        "from .helpers import x",
        "def f():\n    from .fused_flashmap import x",
        "try:\n    from .fused_flashmap import x\nexcept ImportError:\n    pass",
        '"""Use it so:\n    from .fused_flashmap import x\n"""',
        "# from .fused_flashmap import x",
        "import numpy",
        "def f():\n    import flashmap",
        "import triton",
        "def f():\n    try:\n        import triton\n    except ImportError:\n        pass",
    ],
)
def test_a_breach_of_the_remote_code_rules_is_found(text: str) -> None:
    assert remote_code_findings(text)


def test_sound_remote_code_passes() -> None:
    text = '"""One."""\n\nimport math\n\nimport torch\n\nfrom .fused_flashmap import x\n'
    assert (
        remote_code_findings(f"{text}\ntry:\n    import triton\nexcept ImportError:\n    pass\n")
        == []
    )


# --- size


def test_files_stay_short() -> None:
    lengths = {path.relative_to(ROOT): path.read_text().count("\n") for path in ALL}
    for path, length in lengths.items():
        if WISHED_LINES < length <= MAX_LINES:
            warnings.warn(f"{path}: {length} lines; aim at {WISHED_LINES}", stacklevel=1)
    long = {str(path): length for path, length in lengths.items() if length > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method of a module, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def is_kernel(function: Function) -> bool:
    """Whether a function is a Triton kernel: triton.jit is among its decorators."""
    return any("jit" in ast.unparse(item).split(".") for item in function.decorator_list)


def long_functions(text: str) -> list[str]:
    """Functions whose body is over the limit; docstring and signature are declarations."""
    found = []
    for function in functions(ast.parse(text)):
        documented = ast.get_docstring(function) is not None
        body = function.body[documented:] or function.body
        length = (function.end_lineno or 0) - body[0].lineno + 1
        limit = MAX_KERNEL if is_kernel(function) else MAX_FUNCTION
        if length > limit:
            found.append(f"{function.lineno}: {function.name} has {length} lines, limit {limit}")
    return found


def test_functions_stay_short() -> None:
    report(long_functions, ALL)


def test_a_long_function_is_found() -> None:
    body = "    pass\n" * (MAX_FUNCTION + 1)
    assert long_functions(f"def f():\n{body}")
    assert not long_functions(f"@triton.jit\ndef f():\n{body}")


# --- docstrings, broad handlers, the environment


def missing_module_docstring(text: str) -> list[str]:
    """The one finding if a module does not say what it is."""
    return [] if ast.get_docstring(ast.parse(text)) else ["1: a module says what it is and why"]


def is_signature(node: ast.stmt) -> bool:
    """Whether a function has no body but `...`, as an overload or a Protocol member has."""
    return isinstance(node, Function) and [ast.unparse(line) for line in node.body] == ["..."]


def missing_docstrings(text: str) -> list[str]:
    """Public functions, classes and methods without a docstring, bare signatures aside."""

    def visit(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, (Function, ast.ClassDef)) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None and not is_signature(node):
                    yield f"{node.lineno}: {node.name} has no docstring"
                if isinstance(node, ast.ClassDef):
                    yield from visit(node.body)

    return list(visit(ast.parse(text).body))


def broad_handlers(text: str) -> list[str]:
    """Handlers of everything without a written reason: `# noqa: BLE001 - why`."""
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = {
            name.id
            for name in ast.walk(node.type or ast.Name("Exception"))
            if isinstance(name, ast.Name)
        }
        reason = re.search(r"# noqa: BLE001\W+\w+", lines[node.lineno - 1])
        if caught & {"Exception", "BaseException"} and not reason:
            found.append(f"{node.lineno}: a broad except states its reason in a noqa")
    return found


def environment_reads(text: str) -> list[str]:
    """Uses of os.environ and os.getenv."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [f"os.{alias.name}" for alias in node.names]
        if {"os.environ", "os.getenv", "os.environb"} & set(names):
            found.append(f"{node.lineno}: the environment is read in {sorted(READS_ENVIRONMENT)}")
    return found


def test_every_module_has_a_docstring() -> None:
    report(missing_module_docstring, ALL)


def test_every_public_name_has_a_docstring() -> None:
    report(missing_docstrings, SHIPPED)


def test_broad_handlers_state_a_reason() -> None:
    report(broad_handlers, ALL)


def test_the_environment_is_read_in_few_places() -> None:
    report(
        environment_reads,
        [path for path in SHIPPED if path.relative_to(ROOT).as_posix() not in READS_ENVIRONMENT],
    )


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (missing_module_docstring, "x = 1"),
        (missing_docstrings, "def f(): pass"),
        (missing_docstrings, "class A:\n    '''A.'''\n    def f(self): pass"),
        (broad_handlers, "try:\n    pass\nexcept Exception:\n    pass"),
        (broad_handlers, "try:\n    pass\nexcept:\n    pass"),
        (
            broad_handlers,
            "try:\n    pass\nexcept (ValueError, BaseException):  # noqa: BLE001\n    pass",
        ),
        (environment_reads, "import os\nx = os.environ['X']"),
        (environment_reads, "from os import getenv"),
    ],
)
def test_a_breach_is_found(check: Check, text: str) -> None:
    assert check(text)
