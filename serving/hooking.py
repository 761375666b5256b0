"""How a plugin changes its engine: tables of functions that are wrapped and of entries that are
added, put in all or none, and taken out again.

Hooks hand on what they are given; the engine's other drafts take their own way unchanged.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
Undo = Callable[[], None]


@dataclass(frozen=True)
class Hook:
    """One function of an engine that is wrapped.

    Attributes:
        module: where it is defined.
        name: its name there, dotted for a method.
        parameters: of those that it has to have, the names.
        wrapper: from the function to its replacement.
        why: what the replacement is for.
        bound: modules that may have imported it by name.
        versions: of the engine, that have to have it; empty: all.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    wrapper: Wrapper
    why: str
    bound: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One entry of a table or a set of an engine that is added."""

    module: str
    name: str
    key: str
    value: Any
    why: str


class Unfit(Exception):  # noqa: N818 - it is a finding, handled where it is raised
    """This engine lacks what a hook needs."""


def install(hooks: Sequence[Hook], entries: Sequence[Entry]) -> list[Undo]:
    """Install every hook and entry, or none; returns what takes them out again.

    Raises:
        Unfit: this engine is not the one that the hooks were made for.
    """
    found = [(hook, *find(hook.module, hook.name)) for hook in hooks]
    tables = [(entry, find(entry.module, entry.name)[2]) for entry in entries]
    for hook, _, _, function in found:
        missing = set(hook.parameters) - inspect.signature(function).parameters.keys()
        if missing:
            raise Unfit(f"{hook.module}.{hook.name} has no {', '.join(sorted(missing))}")
    undo: list[Undo] = []
    for hook, holder, attribute, function in found:
        undo += _replace(hook, holder, attribute, function)
    for entry, table in tables:
        undo.append(_add(table, entry))
    return undo


def find(module: str, name: str) -> tuple[Any, str, Any]:
    """What holds `name` of a module, its last part, and the value.

    Raises:
        Unfit: it is not there.
    """
    try:
        holder: Any = importlib.import_module(module)
        *path, attribute = name.split(".")
        for part in path:
            holder = getattr(holder, part)
        return holder, attribute, getattr(holder, attribute)
    except (ImportError, AttributeError) as error:
        raise Unfit(f"{module}.{name} is not there ({error})") from error


def _replace(hook: Hook, holder: Any, attribute: str, function: Any) -> list[Undo]:
    static = inspect.getattr_static(holder, attribute)
    inner = static.__func__ if isinstance(static, classmethod) else function
    wrapped: Any = hook.wrapper(inner)
    places = [holder]
    places += [sys.modules[name] for name in hook.bound if name in sys.modules]
    undo: list[Undo] = []
    for place in places:
        undo.append(functools.partial(setattr, place, attribute, static))
        setattr(place, attribute, classmethod(wrapped) if inner is not function else wrapped)
    return undo


def _add(table: Any, entry: Entry) -> Undo:
    if isinstance(table, set):
        table.add(entry.key)
        return functools.partial(table.discard, entry.key)
    table[entry.key] = entry.value
    return functools.partial(table.pop, entry.key, None)
