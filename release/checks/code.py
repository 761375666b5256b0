"""Checks of the remote code: would transformers' loader find every file, on every version, on a
machine that has torch and transformers alone?
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flashmap.checkpoint import CONFIG

from ..checking import ReleaseFolder, check
from ..contents import CUSTOM_GENERATE, GENERATE
from ..errors import ReleaseError
from ..remote_code import AUTO_MAP, CONFIGURATION, MODELING, code_digest, read_stamp

AVAILABLE = sys.stdlib_module_names | {"torch", "transformers", "huggingface_hub"}
FILE_NAME = re.compile(r"[a-z0-9_]+\.py")
# Where generate.py says which release it belongs to, and what release.json calls that.
STAMP, STAMPED = "REPO_ID, TAG", ("repo_id", "tag")
# What a class that a release loads has to state, and what it must not bring without the mixin.
STATED = ("config_class", "base_model_prefix", "main_input_name")
NEEDS_MIXIN = ("generate", "prepare_inputs_for_generation")
EDIT_SOURCE = "edit the source and build again"


def _fail(name: str, problems: Mapping[str, list[str]], expected: str, fix: str) -> None:
    """Raise ReleaseError if any file has a problem."""
    told = [f"{file}: {problem}" for file, found in problems.items() for problem in found]
    if told:
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        blamed = [file for file, found in problems.items() if found]
        raise ReleaseError(name, "; ".join(told[:3]) + more, expected, fix, blamed)


@check("remote-code")
def remote_code(release: ReleaseFolder) -> str:
    """The files that the loader's search of the text leads to."""
    return f"{len(release.code)} files, each named by {MODELING}"


@check("code-names")
def code_names(release: ReleaseFolder) -> str:
    """Names under which a file can be imported as a sibling."""
    found = [name for name in release.files if name.endswith(".py") and "/" not in name]
    odd = {
        name: ["upper case, a dot or a hyphen"] for name in found if not FILE_NAME.fullmatch(name)
    }
    _fail("code-names", odd, "lower-case letters, digits and underscores", "rename it")
    return f"{len(found)} Python files at the top"


@check("code-imports")
def code_imports(release: ReleaseFolder) -> str:
    """Imports that fail where nothing but torch and transformers is installed."""
    problems = {name: list(_imports(_tree(content))) for name, content in release.code.items()}
    _fail(
        "code-imports",
        problems,
        "torch, transformers, the standard library, and siblings at the top of a file",
        f"put what is optional into a module-level try, or {EDIT_SOURCE}",
    )
    return "torch, transformers, the standard library, siblings"


def _tree(content: bytes) -> ast.Module | str:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError) as error:
        return f"no Python that can be read ({error})"


def _imports(tree: ast.Module | str) -> Iterator[str]:
    """What is wrong with the imports of a file."""
    if isinstance(tree, str):
        yield tree
        return
    tried = {child for node in tree.body if isinstance(node, ast.Try) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            if node not in tree.body:
                yield f"line {node.lineno} imports a sibling inside other code"
            continue
        module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in module or [alias.name for alias in node.names]:
            if name.split(".")[0] not in AVAILABLE and node not in tried:
                yield f"line {node.lineno} imports {name}, which may be missing"


@check("code-classes")
def code_classes(release: ReleaseFolder) -> str:
    """The two classes that auto_map names, as every version loads, saves and initialises them."""
    problems = {}
    for entry in AUTO_MAP.values():
        module, _, name = entry.partition(".")
        tree = _tree(release.code[f"{module}.py"])
        body = tree.body if isinstance(tree, ast.Module) else []
        found = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == name), None)
        wrong = [f"no class {name}"] if found is None else list(_class_problems(found))
        problems[f"{module}.py"] = wrong
    _fail("code-classes", problems, "classes that every transformers loads", EDIT_SOURCE)
    return ", ".join(entry.partition(".")[2] for entry in AUTO_MAP.values())


def _class_problems(found: ast.ClassDef) -> Iterator[str]:
    bases = {ast.unparse(base) for base in found.bases}
    if "PretrainedConfig" in bases:
        yield from _config_problems(found)
        return
    calls = {ast.unparse(node.func) for node in ast.walk(found) if isinstance(node, ast.Call)}
    stated = {name for node in found.body for name in _assigned(node)}
    methods = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    if "PreTrainedModel" not in bases:
        yield f"{found.name} is no PreTrainedModel of transformers' top level"
    if "self.post_init" not in calls:
        yield f"{found.name} does not call post_init(), without which 5.x cannot load it"
    if missing := [name for name in STATED if name not in stated]:
        yield f"{found.name} does not state {', '.join(missing)}"
    if "GenerationMixin" not in bases and (own := methods & set(NEEDS_MIXIN)):
        yield f"{found.name} has {', '.join(sorted(own))} without GenerationMixin"
    for node in ast.walk(found):
        if isinstance(node, ast.Call) and "persistent=False" in map(ast.unparse, node.keywords):
            yield f"line {node.lineno} has a buffer that is not saved, garbage after loading"


def _config_problems(found: ast.ClassDef) -> Iterator[str]:
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(
            node.value, ast.List | ast.Dict | ast.Set
        ):
            yield f"line {node.lineno} has an annotated mutable attribute, which 5.x refuses"


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@check("auto-map")
def auto_map(release: ReleaseFolder) -> str:
    """Where AutoConfig and AutoModel find their classes."""
    wanted = {"auto_map": AUTO_MAP, "architectures": ["FlashMapDraftModel"]}
    wrong = {name: release.raw_config.get(name) for name in wanted}
    wrong = {name: value for name, value in wrong.items() if value != wanted[name]}
    if wrong:
        text = ", ".join(f"{name} is {value!r}" for name, value in wrong.items())
        expected = ", ".join(repr(wanted[name]) for name in wrong)
        raise ReleaseError("auto-map", text, expected, "build again", [CONFIG])
    return ", ".join(AUTO_MAP)


@check("custom-generate")
def custom_generate(release: ReleaseFolder) -> str:
    """The code that `generate(custom_generate=...)` runs."""
    own = release.custom_generate
    problems: dict[str, list[str]] = {name: [] for name in own}
    for name in (name for name in own if name.endswith(".py")):
        tree = _tree(own[name])
        problems[name] += _imports(tree)
        if isinstance(tree, ast.Module):
            problems[name] += _siblings(tree, own)
            problems[name] += _entry(tree) if name == GENERATE else []
            problems[name] += _stamp(tree, [release.record.get(key) for key in STAMPED])
    _fail(
        "custom-generate",
        problems,
        "generate.py with generate(model, ..., **kwargs), importing siblings alone",
        EDIT_SOURCE,
    )
    return f"{len(own)} files"


def _siblings(tree: ast.Module, own: Iterable[str]) -> Iterator[str]:
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        if node.level > 1 or f"{CUSTOM_GENERATE}/{node.module}.py" not in own:
            yield f"line {node.lineno} imports what is not beside it in {CUSTOM_GENERATE}/"


def _entry(tree: ast.Module) -> Iterator[str]:
    found: Any = [node for node in tree.body if getattr(node, "name", "") == "generate"]
    named = {alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom)
             for alias in n.names}  # fmt: skip
    if not found and "generate" not in named:
        yield "no function generate"
    elif found and (not found[0].args.args or found[0].args.kwarg is None):
        yield "generate does not take the model and **kwargs"


def _stamp(tree: ast.Module, recorded: list[str | None]) -> Iterator[str]:
    wanted = repr(tuple(value or "" for value in recorded))
    for node in tree.body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]).strip("()") != STAMP:
            continue
        if ast.unparse(node.value) != wanted:
            yield f"{STAMP} = {ast.unparse(node.value)}, and {wanted} in the record"


@check("code-digest", needs=["code"])
def digest(release: ReleaseFolder) -> str:
    """The digest of all code, stamped where a change makes transformers load the new code."""
    code = {**release.code, **release.custom_generate}
    found, stamp = code_digest(code), read_stamp(code[CONFIGURATION])
    stated = {
        f"the stamp in {CONFIGURATION}": (stamp, CONFIGURATION),
        f"code_digest in {CONFIG}": (release.raw_config.get("code_digest"), CONFIG),
    }
    wrong = {where: value for where, (value, _) in stated.items() if value != found}
    if not wrong:
        return found[:16]
    recorded = release.record["files"]
    changed = [name for name in code if recorded.get(name) != release.files[name]]
    blamed = [name for where, (_, name) in stated.items() if where in wrong]
    raise ReleaseError(
        "code-digest",
        " and ".join(f"{where} is {value!r}" for where, value in wrong.items())
        + (f"; {', '.join(changed)} changed since the build" if changed else ""),
        found,
        f"a shipped file was edited after the build: {EDIT_SOURCE}",
        [*changed, *(blamed if not changed else [])],
    )
