import json
from pathlib import Path
from typing import Any

from megabatch.comm.timeline import KEPT_STEPS, LANES, NETWORK, TRAINING, Timeline


def rows_of(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    timeline.write(path)
    assert list(path.parent.iterdir()) == [path]
    rows: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return rows


def test_the_newest_steps_are_kept_however_long_the_run(tmp_path: Path) -> None:
    timeline = Timeline(rank=3, origin_s=0.0, first_step=8)
    for step in range(8, 8 + 10 * KEPT_STEPS):
        timeline.begin_step(step)
        timeline.note_ready("bucket 0", 4, "flat/fp32")
        timeline.note_summed("bucket 0")
    rows = rows_of(timeline, tmp_path / "rank-3.json")
    assert {row["args"]["step"] for row in rows if "step" in row["args"]} == set(range(step - KEPT_STEPS, step + 1))
    assert {row["pid"] for row in rows} == {3}
    assert [row["args"]["name"] for row in rows if row["name"] == "thread_name"] == list(LANES)


def test_a_lane_does_one_thing_at_a_time_and_a_wait_ends_where_the_phase_begins(tmp_path: Path) -> None:
    timeline = Timeline(rank=0, origin_s=0.0, first_step=1)
    timeline.enter(TRAINING, "forward")
    timeline.enter(NETWORK, "bucket 1: all_reduce across", bytes=8)
    timeline.enter(TRAINING, "backward")
    timeline.leave(NETWORK, waited_s=1e-9)
    timeline.leave(NETWORK)
    rows = [row for row in rows_of(timeline, tmp_path / "rank-0.json") if row["ph"] == "X"]
    forward, wait, phase, backward = rows
    assert [row["name"] for row in rows] == [
        "forward",
        "bucket 1: waits for other ranks",
        "bucket 1: all_reduce across",
        "backward",  # still under way
    ]
    assert abs(forward["ts"] + forward["dur"] - backward["ts"]) < 0.01 and backward["dur"] > 0
    assert abs(wait["ts"] + wait["dur"] - phase["ts"]) < 0.01
    assert phase["args"] == {"step": 1, "bytes": 8} and phase["tid"] != forward["tid"]
