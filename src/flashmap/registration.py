"""Makes transformers' AutoConfig and AutoModel know `flashmap`, without importing them early.

Registering needs our two classes, and these need torch and transformers: seconds of import time
that `import flashmap` should not cost. So the package watches the import system instead and
registers right after transformers has loaded its Auto classes, which every caller has to load
before using them.

The classes are registered only while nothing of transformers or of `flashmap.modeling` is
half-loaded: importing them in the middle of another module's import would run into a circle.
"""

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_AUTO_CONFIG = "transformers.models.auto.configuration_auto"
_AUTO_MODEL = "transformers.models.auto.modeling_auto"
_WATCHED = ("transformers", "transformers.", "flashmap.modeling.")


class _Registrar(MetaPathFinder):
    """Counts the watched modules that are being loaded; registers when the count falls to zero."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loading = 0
        self._registering = False
        self._config_done = False
        self._model_done = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module with the other finders and have its execution observed."""
        if fullname != _WATCHED[0] and not fullname.startswith(_WATCHED[1:]):
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ObservedLoader(spec.loader, self)
                return spec
        return None

    def begin(self) -> None:
        """Note that a watched module starts to execute."""
        with self._lock:
            self._loading += 1

    def end(self) -> None:
        """Note that a watched module has executed, whether or not it raised."""
        with self._lock:
            self._loading -= 1

    def register_if_idle(self) -> None:
        """Register what can be registered now; leave the import system alone once both are."""
        if self._loading or self._registering:
            return
        self._registering = True
        try:
            if not self._config_done and _AUTO_CONFIG in sys.modules:
                _register_config()
                self._config_done = True
            if not self._model_done and _AUTO_MODEL in sys.modules:
                _register_model()
                self._model_done = True
        finally:
            self._registering = False
        if self._config_done and self._model_done and self in sys.meta_path:
            sys.meta_path.remove(self)


class _ObservedLoader(Loader):
    """Runs a module's own loader and tells the registrar; the module sees no difference."""

    def __init__(self, loader: Loader, registrar: _Registrar) -> None:
        self._loader = loader
        self._registrar = registrar

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave the creation to the module's own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module's own loader back, execute the module, register if it was the last."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._registrar.begin()
        try:
            self._loader.exec_module(module)
        finally:
            self._registrar.end()
        self._registrar.register_if_idle()


def _register_config() -> None:
    from transformers import AutoConfig

    config_class = import_module("flashmap.modeling.configuration_flashmap").FlashMapConfig
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def _register_model() -> None:
    from transformers import AutoModel

    config_class = import_module("flashmap.modeling.configuration_flashmap").FlashMapConfig
    model_class = import_module("flashmap.modeling.modeling_flashmap").FlashMapDraftModel
    AutoModel.register(config_class, model_class, exist_ok=True)


def register_when_loaded() -> None:
    """Register what transformers has loaded already, and the rest when it loads; idempotent."""
    if any(isinstance(finder, _Registrar) for finder in sys.meta_path):
        return
    registrar = _Registrar()
    sys.meta_path.insert(0, registrar)
    registrar.register_if_idle()
