import time

from hypothesis import given
from hypothesis import strategies as st

from megabatch.telemetry.activity import Activity
from megabatch.training.step_metrics import step_times

ACTIVITIES = ["data", "forward", "backward", "all-reduce", "update", "evaluation", "checkpoint", "records", "anything"]


@given(st.dictionaries(st.sampled_from(ACTIVITIES), st.floats(0, 1e4)))
def test_the_parts_of_a_step_add_up_to_the_seconds_spent(spent_s: dict[str, float]) -> None:
    times = step_times(spent_s)
    assert abs(times.total - sum(spent_s.values())) < 1e-5
    assert all(getattr(times, part) >= 0 for part in times.__struct_fields__)


def test_the_wait_for_other_ranks_is_not_part_of_backward() -> None:
    times = step_times({"backward": 0.5, "all-reduce": 0.25, "records": 0.125, "checkpoint": 1.0})
    assert (times.backward, times.comm, times.other, times.checkpoint) == (0.5, 0.25, 0.125, 1.0)


def test_backward_ends_with_its_last_bucket() -> None:
    activity = Activity(timeout_s=60.0)
    activity.bucket_is_ready(is_last=True)  # in the warm-up pass
    assert activity.what == "start-up" and not activity.waits
    activity.begin("backward")
    activity.bucket_is_ready(is_last=False)
    assert activity.what == "backward" and not activity.waits and activity.changed_s > activity.since_s
    activity.bucket_is_ready(is_last=True)
    assert activity.what == "all-reduce" and activity.waits


def test_overlapping_activities_are_counted_once() -> None:
    activity = Activity(timeout_s=60.0)
    activity.take()
    began_s = time.perf_counter()
    for what in ("data", "forward", "backward", "data", "forward"):
        activity.begin(what)
        time.sleep(0.002)
    first = activity.take()  # during forward
    time.sleep(0.002)
    second = activity.take()
    taken_s = time.perf_counter() - began_s
    assert set(first) - {"start-up"} == {"data", "forward", "backward"} and set(second) == {"forward"}
    assert first["data"] >= 0.004 and first["backward"] >= 0.002
    assert 0.01 <= sum(first.values()) + sum(second.values()) - first.get("start-up", 0.0) <= taken_s + 1e-3
