"""A Hub for every test, and the command line in this process."""

from support.commands import run
from support.hub.fixtures import hub, released, waits

__all__ = ["hub", "released", "run", "waits"]
