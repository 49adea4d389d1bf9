"""`comm.timeline` on real ranks: the lanes match the run, and the run is the same without it."""

import json
import time
from collections import defaultdict
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabatch.data.catalog import load_data_set
from megabatch.ranks.world import World
from megabatch.telemetry.timeline import BUCKETS, IN_NODE, LANES, NETWORK, STEPS, TRAINING, Timeline
from megabatch.training.checkpoint.resume import decide_start
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import train_and_record
from megabatch.training.traces import write_timeline
from tests.support.hosts import on_hosts
from tests.support.rank_pool import RankPool, RanksFailed
from tests.support.small_runs import small_run

NUM_STEPS = 15
WAITS = ("waits for other ranks", "waits for the network")


def train_recorded(world: World, hosts: str, folder: str, fail_at: int, *overrides: str) -> dict[str, Any]:
    """Train a small run with several buckets.  Rank 1 fails in step `fail_at`."""
    asked = 0

    def fail() -> bool:
        nonlocal asked
        asked += 1
        if world.rank == 1 and asked == fail_at:
            raise ValueError("the disk is full")
        return False

    config = small_run("train.epochs=2.4", "comm.bucket_mb=0.002", f"run.dir={folder}", *overrides)
    with on_hosts(world, hosts):
        training = ready_to_train(config, load_data_set(config.data), world, stop_requested=fail)
    began_s = time.perf_counter()
    train_and_record(config, decide_start(config, "auto", world), training)
    return {
        "took_us": 1e6 * (time.perf_counter() - began_s),
        "phases": [str(phase) for phase in training.gradients.plans.default.phases],
        "buckets": [f"bucket {index}" for index in sorted(training.gradients.layouts.seen)],
        "evaluated": [step for step in range(1, NUM_STEPS + 1) if training.plan.should_evaluate_after(step)],
        "state": {key: value.cpu().numpy() for key, value in training.model.module.state_dict().items()},
    }


def lanes_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events of each lane, in the order of time."""
    rows = json.loads(path.read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert set(names.values()) == set(LANES)
    lanes = defaultdict(list)
    for row in rows:
        if row["ph"] != "M":
            lanes[names[row["tid"]]].append(row)
    return {lane: sorted(events, key=lambda row: float(row["ts"])) for lane, events in lanes.items()}


@pytest.mark.parametrize(("hosts", "algorithm"), [("aa", "auto"), ("ab", "flat"), ("aabb", "torus")])
def test_every_bucket_has_its_phases_after_it_is_ready_and_lanes_do_not_overlap(
    ranks: RankPool, hosts: str, algorithm: str, tmp_path: Path
) -> None:
    if len(hosts) > ranks.size or ranks.device != "cpu":
        pytest.skip("needs more ranks, or shared memory")
    options = ["comm.timeline=true", f"comm.algorithm={algorithm}"]
    results = ranks.run(train_recorded, hosts, str(tmp_path / "run"), 0, *options, num_ranks=len(hosts))
    files = sorted((tmp_path / "run/timeline").iterdir())
    assert [file.name for file in files] == [f"rank-{rank}.json" for rank in range(len(hosts))]
    for file, result in zip(files, results, strict=True):
        lanes = lanes_of(file)
        begin_us = min(events[0]["ts"] for events in lanes.values())
        end_us = max(events[-1]["ts"] + events[-1].get("dur", 0) for events in lanes.values())
        assert end_us - begin_us <= result["took_us"]
        assert begin_us >= 0 or hosts != "aa"  # with several hosts, the start time is less exact
        for lane, events in lanes.items():
            if lane != BUCKETS:
                for one, other in pairwise(events):
                    assert one["ts"] + one["dur"] <= other["ts"] + 0.01  # for rounding
        assert [event["name"] for event in lanes[STEPS]] == [f"step {step}" for step in range(1, NUM_STEPS + 1)]
        for step in range(1, NUM_STEPS + 1):
            check_training(lanes, step, 8 // len(hosts), step in result["evaluated"])
            assert len(result["buckets"]) > 2
            for bucket in [*result["buckets"], "the step's metrics"]:
                check_bucket(lanes, step, bucket, result["phases"])


def check_training(lanes: dict[str, list[dict[str, Any]]], step: int, accumulation: int, evaluated: bool) -> None:
    names = [event["name"] for event in lanes[TRAINING] if event["args"]["step"] == step]
    expected = ["data", "forward", "backward"] * accumulation
    expected += ["all-reduce", "update", "the device's results", "records"]
    found = [name for name, _ in groupby(names) if name not in ("comparison of weights", "checkpoint")]
    assert found == expected + ["evaluation", "records"] * evaluated


def check_bucket(lanes: dict[str, list[dict[str, Any]]], step: int, bucket: str, phases: list[str]) -> None:
    noted = [
        event
        for event in lanes[BUCKETS]
        if event["args"]["step"] == step and event["name"] in (bucket, f"{bucket} ready")
    ]
    assert [event["ph"] for event in noted] == ["i", "b", "e"]
    ready, _, reduced = noted
    spans = [
        event
        for lane in (IN_NODE, NETWORK)
        for event in lanes.get(lane, [])
        if event["args"]["step"] == step and event["name"].startswith(f"{bucket}: ")
    ]
    assert all(ready["ts"] <= span["ts"] and span["ts"] + span["dur"] <= reduced["ts"] + 0.01 for span in spans)
    done = {span["name"].removeprefix(f"{bucket}: "): span for span in sorted(spans, key=lambda span: span["ts"])}
    assert [name for name in done if name not in WAITS] == phases
    assert all(0 < done[phase]["args"]["bytes"] <= ready["args"]["bytes"] for phase in phases)
    backward, waiting = [
        [event for event in lanes[TRAINING] if event["name"] == name and event["args"]["step"] == step][-1]
        for name in ("backward", "all-reduce")
    ]
    assert ready["ts"] <= backward["ts"] + backward["dur"] and reduced["ts"] <= waiting["ts"] + waiting["dur"]


def test_a_timeline_changes_no_bit_and_is_written_only_on_request(ranks: RankPool, tmp_path: Path) -> None:
    on, off = [
        ranks.run(train_recorded, "aa", str(tmp_path / name), 0, f"comm.timeline={name}", num_ranks=2)
        for name in ("true", "false")
    ]
    for ours, theirs in zip(on, off, strict=True):
        assert all(np.array_equal(ours["state"][key], theirs["state"][key]) for key in theirs["state"])
    assert (tmp_path / "true/timeline").exists() and not (tmp_path / "false/timeline").exists()


def test_ranks_of_a_failed_run_write_their_timeline_until_the_failure(ranks: RankPool, tmp_path: Path) -> None:
    if ranks.device != "cpu":
        pytest.skip("needs Gloo: NCCL notices a missing rank only after the timeout")
    with pytest.raises(RanksFailed, match="the disk is full"):
        ranks.run(train_recorded, "aa", str(tmp_path / "run"), 4, "comm.timeline=true", num_ranks=2)
    for rank, last in enumerate(("all-reduce", "forward")):
        lanes = lanes_of(tmp_path / f"run/timeline/rank-{rank}.json")
        assert [event["name"] for event in lanes[STEPS]] == [f"step {step}" for step in range(1, 5)]
        assert lanes[TRAINING][-1]["name"] == last


def test_a_host_that_does_not_see_the_folder_reports_it(tmp_path: Path) -> None:
    said = write_timeline(Timeline(rank=1), tmp_path / "elsewhere")
    assert said and "elsewhere does not exist on this node" in said and not list(tmp_path.iterdir())
