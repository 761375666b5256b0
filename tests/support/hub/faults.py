"""What can go wrong between a client and a Hub, to be ordered in advance by a test."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

FOREVER = 10**9


@dataclass
class Fault:
    """Something that goes wrong at the next requests whose "METHOD /path" a pattern matches.

    Attributes:
        pattern: regular expression, searched in the request line.
        status: answered in place of the real answer; None leaves that alone.
        cut: the connection breaks, half-way through the body that is under way.
        after: the request is carried out first; only its answer is lost.
        do: called at that moment: another writer's commit, or the client's death.
        delay: seconds to wait first.
        retry_after: seconds that the answer asks the client to wait.
        times: at how many matching requests.
    """

    pattern: str
    status: int | None = None
    cut: bool = False
    after: bool = False
    do: Callable[[], object] | None = None
    delay: float = 0.0
    retry_after: float | None = None
    times: int = 1

    def happen(self) -> None:
        """Wait, and do what is to be done; the answer is the server's part."""
        threading.Event().wait(self.delay)
        if self.do is not None:
            self.do()


class Faults:
    """The faults that were ordered and have not all happened yet."""

    def __init__(self) -> None:
        self._ordered: list[Fault] = []
        self._lock = threading.Lock()

    def order(self, fault: Fault) -> Fault:
        """Add a fault; of several that match a request, the first ordered happens."""
        with self._lock:
            self._ordered.append(fault)
        return fault

    def take(self, line: str) -> Fault | None:
        """The fault that is due at this request."""
        with self._lock:
            for fault in self._ordered:
                if fault.times and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None
