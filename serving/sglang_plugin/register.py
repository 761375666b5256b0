"""The entry point that sglang calls in each of its processes."""

from flashmap.serving.registration import Registration

from .hooks import VERSIONS, install


def _version() -> tuple[str, str]:
    import sglang

    return sglang.__version__, ".".join(sglang.__version__.split(".")[:3])


_registration = Registration("sglang", VERSIONS, _version, install)
register = _registration.register
unregister = _registration.unregister
