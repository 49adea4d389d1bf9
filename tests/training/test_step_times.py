import time

from hypothesis import given
from hypothesis import strategies as st

from megabatch.telemetry.activity import Activity
from megabatch.training.step_metrics import step_times

ACTIVITIES = ["data", "forward", "backward", "all-reduce", "update", "evaluation", "checkpoint", "records", "anything"]


@given(st.dictionaries(st.sampled_from(ACTIVITIES), st.floats(0, 1e4)), st.floats(-1, 1e5))
def test_the_parts_add_up_to_what_was_spent(spent_s: dict[str, float], comm_s: float) -> None:
    times = step_times(spent_s, comm_s)
    assert abs(times.total - sum(spent_s.values())) < 1e-5
    assert all(getattr(times, part) >= 0 for part in times.__struct_fields__)


def test_what_was_waited_for_other_ranks_is_no_part_of_backward() -> None:
    times = step_times({"backward": 0.5, "all-reduce": 0.25, "records": 0.125, "checkpoint": 1.0}, comm_s=0.3)
    assert (times.backward, times.comm, times.other, times.checkpoint) == (0.45, 0.3, 0.125, 1.0)


def test_a_host_counts_every_moment_once() -> None:
    activity = Activity(timeout_s=60.0)
    activity.times.take()
    began_s = time.perf_counter()
    for what in ("data", "forward", "backward", "data", "forward"):
        activity.begin(what)
        time.sleep(0.002)
    first = activity.times.take()  # in the midst of forward
    time.sleep(0.002)
    second = activity.times.take()
    taken_s = time.perf_counter() - began_s
    assert set(first) - {"start-up"} == {"data", "forward", "backward"} and set(second) == {"forward"}
    assert first["data"] > first["backward"] > 0
    assert 0.01 <= sum(first.values()) + sum(second.values()) - first.get("start-up", 0.0) <= taken_s + 1e-3
