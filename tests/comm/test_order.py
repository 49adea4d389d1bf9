from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from megabatch.comm.phases import DEPTH, NodeOrder


@given(lasts=st.lists(st.booleans(), max_size=30))
def test_later_parts_go_ahead_and_the_last_of_a_step_completes_all(lasts: list[bool]) -> None:
    """Compare with the loop of a thread that takes the parts one by one."""
    order: NodeOrder[int] = NodeOrder()
    in_flight: deque[int] = deque()
    for number, is_last in enumerate(lasts):
        expected = []
        in_flight.append(number)
        while len(in_flight) > (0 if is_last else DEPTH):
            expected.append(in_flight.popleft())
        assert order.due_after(number, is_last) == expected
        assert list(order.in_flight) == list(in_flight)
