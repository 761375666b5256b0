"""A Hub for every test."""

from support.hub.fixtures import hub, released, waits

__all__ = ["hub", "released", "waits"]
