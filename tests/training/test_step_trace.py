from megabatch.telemetry.timeline import BUCKETS, IN_NODE, NETWORK, TRAINING, Event
from megabatch.training.traces import trace_of

PLAN = {"plan": "torus", "bytes": 400}


def activities(step: int, began_s: float, *parts: tuple[str, float]) -> list[Event]:
    done = []
    for what, taken_s in parts:
        done.append(Event("X", TRAINING, what, step, began_s, began_s + taken_s, {}))
        began_s += taken_s
    return done


def step(number: int, began_s: float, taken_s: float, *more: tuple[str, float]) -> list[Event]:
    return activities(
        number, began_s, ("data", 0.25), ("forward", taken_s - 0.5), ("backward", 0.125), ("all-reduce", 0.125), *more
    )


def bucket(kind: str, lane: str, name: str, of_step: int, begin_s: float, end_s: float, number: int) -> Event:
    return Event(kind, lane, name, of_step, begin_s, end_s, {**PLAN, "bucket": number})


def test_the_ordinary_step_of_median_duration_is_kept_with_its_buckets() -> None:
    done = [
        *step(10, 0.0, 1.0),
        *step(11, 1.0, 8.0),  # slow
        *step(12, 9.0, 2.0),
        *step(13, 11.0, 3.0, ("evaluation", 50.0)),
        *step(14, 64.0, 1.0),
    ]
    events = [
        bucket("b", BUCKETS, "bucket 0", 12, 10.5, 10.5, 0),
        bucket("e", BUCKETS, "bucket 0", 12, 10.75, 10.75, 0),
        bucket("b", BUCKETS, "bucket 1", 12, 10.875, 10.875, 1),  # its end was not recorded
        bucket("b", BUCKETS, "the step's metrics", 12, 10.1, 10.1, -1),
        bucket("e", BUCKETS, "the step's metrics", 12, 10.2, 10.2, -1),
        bucket("X", NETWORK, "bucket 0: all_reduce between nodes", 12, 10.6, 10.7, 0),
        bucket("X", IN_NODE, "bucket 0: waits for other ranks", 12, 10.5, 10.6, 0),
        bucket("X", IN_NODE, "the step's metrics: all_reduce in the node", 12, 10.1, 10.2, -1),
        bucket("X", IN_NODE, "bucket 0: all_reduce in the node", 11, 2.0, 3.0, 0),
    ]
    trace = trace_of([*done, *events], range(10, 15))
    assert trace and trace.step == 12 and trace.duration_s == 2.0
    assert [(span.name, span.begin_s) for span in trace.spans if span.lane == "training"] == [
        ("data", 0.0),
        ("forward", 0.25),
        ("backward", 1.75),
        ("all-reduce", 1.875),
    ]
    others = [(span.lane, span.name, span.bucket, span.is_wait) for span in trace.spans if span.lane != "training"]
    assert others == [
        ("node", "all_reduce in the node", None, False),
        ("node", "waits for other ranks", 0, True),
        ("network", "all_reduce between nodes", 0, False),
    ]
    assert [(b.bucket, b.num_bytes, b.plan, b.ready_s, b.reduced_s) for b in trace.buckets] == [
        (0, 400, "torus", 1.5, 1.75)
    ]


def test_without_an_ordinary_step_there_is_no_trace() -> None:
    done = [*step(10, 0.0, 1.0, ("checkpoint", 1.0)), *step(11, 2.0, 1.0)]
    assert trace_of(done, range(10, 12)) is None
