"""One computing thread for the tests of this folder."""

from support.one_thread import one_thread  # noqa: F401  # a fixture that every test here uses
