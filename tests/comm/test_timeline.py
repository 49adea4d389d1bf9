import json
from pathlib import Path
from typing import Any

import torch

from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.comm.work import RankPhases, Work
from megabatch.planning.plan import Plan
from megabatch.telemetry.timeline import ALL_STEPS, KEPT_STEPS, LANES, NETWORK, TRAINING, Timeline


def rows_of(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    timeline.write(path)
    assert list(path.parent.iterdir()) == [path]
    rows: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return rows


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    timeline = Timeline(3, ALL_STEPS)
    timeline.restart(origin_s=0.0, first_step=8)
    plan, tensor = Plan("flat", ()), torch.zeros(1)
    work = Work(0, tensor, 0, 1, BarrierHeader(), plan, RankPhases([], [], [], False), None, True, None)
    for step in range(8, 8 + 10 * KEPT_STEPS):
        timeline.begin_step(step)
        timeline.note_ready(0, tensor, plan)
        timeline.note_reduced(work)
    rows = rows_of(timeline, tmp_path / "rank-3.json")
    assert {row["args"]["step"] for row in rows if "step" in row["args"]} == set(range(step - KEPT_STEPS, step + 1))
    assert {row["pid"] for row in rows} == {3}
    assert [row["args"]["name"] for row in rows if row["name"] == "thread_name"] == list(LANES)


def test_spans_of_a_lane_do_not_overlap_and_a_wait_ends_when_its_phase_begins(tmp_path: Path) -> None:
    timeline = Timeline(0, ALL_STEPS)
    timeline.enter(TRAINING, "forward")
    timeline.enter(NETWORK, "bucket 1: all_reduce between nodes", bytes=8)
    timeline.enter(TRAINING, "backward")
    timeline.leave(NETWORK, waited_s=1e-9)
    timeline.leave(NETWORK)
    rows = [row for row in rows_of(timeline, tmp_path / "rank-0.json") if row["ph"] == "X"]
    forward, wait, phase, backward = rows
    assert [row["name"] for row in rows] == [
        "forward",
        "bucket 1: waits for other ranks",
        "bucket 1: all_reduce between nodes",
        "backward",  # has not ended
    ]
    assert abs(forward["ts"] + forward["dur"] - backward["ts"]) < 0.01 and backward["dur"] > 0
    assert abs(wait["ts"] + wait["dur"] - phase["ts"]) < 0.01
    assert phase["args"] == {"step": 1, "bytes": 8} and phase["tid"] != forward["tid"]
