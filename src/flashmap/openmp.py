"""Keeps a busy machine from slowing CPU decoding by a factor of ten and more.

GNU OpenMP's threads wait for each other in a busy loop, by default almost for ever. On a machine
that is doing something else too, every small matrix product then waits for a thread that does not
run: a forward pass of the embedded target took 10 to 30 times longer. With a bound on the loop it
costs 6 per cent where the machine is idle.
"""

from collections.abc import MutableMapping

_SPINS = "10000"


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Set the bound in `environment`, unless it says something about waiting already.

    The library reads it once, when torch is first imported.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
