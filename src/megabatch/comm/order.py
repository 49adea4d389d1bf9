"""The order of a rank's work inside its node, before and after buckets cross the network.

Legend: buckets (on CPUs, parts of buckets) a, b, c, d, ...; 1 is the work before the network, 3 the work after it.

    a1 b1 c1 d1 a3 e1 b3 f1 c3 ...      the last one of a step: h1 e3 f3 g3 h3

The order does not depend on the speed of the network, because all ranks of a node must run the same operation at the
same time.  Both threads (cpu/workers.py) and streams (accelerator/streams.py) use it.
"""

from collections import deque
from typing import Generic, TypeVar

DEPTH = 3  # buckets in flight when the node continues with the oldest of them

Crossing = TypeVar("Crossing")


class NodeOrder(Generic[Crossing]):
    def __init__(self) -> None:
        self.in_flight: deque[Crossing] = deque()

    def due_after(self, crossing: Crossing, is_last: bool) -> list[Crossing]:
        """Add a bucket that starts to cross.  Return those whose work after the network is due, oldest first."""
        self.in_flight.append(crossing)
        num_due = len(self.in_flight) - (0 if is_last else DEPTH)
        return [self.in_flight.popleft() for _ in range(num_due)]
