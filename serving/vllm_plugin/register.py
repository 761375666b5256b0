"""The entry point that vLLM calls in each of its processes."""

from flashmap.serving.registration import Registration

from .hooks import VERSIONS, install


def _version() -> tuple[str, str]:
    import vllm

    return vllm.__version__, ".".join(vllm.__version__.split(".")[:2])


_registration = Registration("vLLM", VERSIONS, _version, install)
register = _registration.register
unregister = _registration.unregister
