"""In which order a rank works inside its node: what buckets do there before they cross the network, and after.

With buckets (on CPUs, parts of buckets) a, b, c, d, ... and 1 for what one does before, 3 for what it does after:

    a1 b1 c1 d1 a3 e1 b3 f1 c3 ...      the last one of a step: h1 e3 f3 g3 h3

The order is fixed, however fast the network was, because all ranks of a node must take part in the same operation.  So
threads (node_worker.py) and streams (stream_reducer.py) take it from here.
"""

from collections import deque
from typing import Generic, TypeVar

DEPTH = 3  # buckets that are on the network, or wait for it, when the node turns to the oldest of them

Crossing = TypeVar("Crossing")


class NodeOrder(Generic[Crossing]):
    def __init__(self) -> None:
        self.in_flight: deque[Crossing] = deque()

    def due_after(self, crossing: Crossing, is_last: bool) -> list[Crossing]:
        """What the node turns to, oldest first, once this one has done what it does before."""
        self.in_flight.append(crossing)
        num_due = len(self.in_flight) - (0 if is_last else DEPTH)
        return [self.in_flight.popleft() for _ in range(num_due)]
