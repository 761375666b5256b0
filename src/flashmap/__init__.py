"""FlashMap: a flow map drafts a block of tokens, the target verifies it, its distribution stays.

Importing the package stays cheap on purpose: public names are resolved on first use (PEP 562), and
the drafter is announced to transformers' Auto classes at the moment those are loaded (see
`registration`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .registration import register_when_loaded

if TYPE_CHECKING:
    from .modeling.configuration_flashmap import FlashMapConfig
    from .modeling.decoding_flashmap import FlashMapGenerateOutput
    from .modeling.modeling_flashmap import FlashMapCache, FlashMapDraftModel
    from .pair import load_pair

__all__ = [
    "FlashMapCache",
    "FlashMapConfig",
    "FlashMapDraftModel",
    "FlashMapGenerateOutput",
    "__version__",
    "load_pair",
]

# The one place that states the version; pyproject.toml reads it from here.
__version__ = "0.1.0.dev0"

_HOMES = {
    "FlashMapCache": "flashmap.modeling.modeling_flashmap",
    "FlashMapConfig": "flashmap.modeling.configuration_flashmap",
    "FlashMapDraftModel": "flashmap.modeling.modeling_flashmap",
    "FlashMapGenerateOutput": "flashmap.modeling.decoding_flashmap",
    "load_pair": "flashmap.pair",
}


def __getattr__(name: str) -> object:
    """Import the module behind a public name the first time somebody asks for it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'flashmap' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Offer the public names to completion although most of them are not loaded yet."""
    return sorted(set(globals()) | set(__all__))


register_when_loaded()
