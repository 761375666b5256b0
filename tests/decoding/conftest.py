"""One computing thread for the tests of this folder, and what tests of captured rounds share."""

from support.one_thread import one_thread  # noqa: F401  # a fixture that every test here uses
from support.rounds import everywhere, made  # noqa: F401  # fixtures
