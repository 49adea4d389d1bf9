"""Buckets and plans that a run chooses, on real ranks that simulate several nodes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megabatch.data.catalog import load_data_set
from megabatch.planning.tuning import Tuning
from megabatch.ranks.world import World
from megabatch.training.checkpoint.resume import decide_start, find_stored
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import train_and_record
from tests.support.hosts import on_hosts
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run


def tuned(world: World, hosts: str, *overrides: str) -> dict[str, Any]:
    """Run two steps.  Return the tuning, and the buckets and plans that DDP uses."""
    config = small_run(*overrides)
    with on_hosts(world, hosts):
        training = ready_to_train(config, load_data_set(config.data), world)
    records = train(training)
    for _ in range(2):
        next(records)
    gradients = training.gradients
    groups = gradients.reducer.groups
    assert set(groups.process_groups) <= gradients.plans.axes  # groups of other plans are closed
    layouts = sorted(gradients.layouts.seen.items())
    return {
        "tuning": msgspec.json.encode(gradients.plans.tuning),
        "names": [[name for name, *_ in json.loads(layout.text)] for _, layout in layouts],
        "plans": [
            gradients.plans.plan_of(index, sum(parameter.numel() for parameter in layout.parameters)).name
            for index, layout in layouts
        ],
    }


@pytest.mark.parametrize(
    ("hosts", "overrides"),
    [
        ("aabb", []),
        ("abb", ["batch.global=24"]),
        ("ab", ["comm.dtype=bf16"]),
        ("ab", ["comm.algorithm=flat", "comm.bucket_mb=0.002"]),
        ("aa", []),
        ("a", []),
    ],
)
def test_all_ranks_choose_the_same_buckets_and_ddp_uses_them(ranks: RankPool, hosts: str, overrides: list[str]) -> None:
    if len(hosts) > ranks.size or ranks.device != "cpu":
        pytest.skip("needs more ranks, or shared memory")
    results = ranks.run(tuned, hosts, *overrides, num_ranks=len(hosts))
    assert all(result == results[0] for result in results)
    tuning = msgspec.json.decode(results[0]["tuning"], type=Tuning)
    assert [set(bucket.gradients) for bucket in tuning.buckets] == list(map(set, results[0]["names"]))
    assert [bucket.plan.name for bucket in tuning.buckets] == results[0]["plans"]
    assert tuning.topology.num_nodes == len(set(hosts))
    candidates = [candidate for bucket in tuning.buckets for candidate in bucket.candidates]
    travelling = {phase.dtype for candidate in candidates for phase in candidate.plan.phases if phase.axis != "node"}
    expected = "bf16" if "comm.dtype=bf16" in overrides else "same"
    assert travelling == ({expected} if len(set(hosts)) > 1 else set())
    if "comm.algorithm=flat" in overrides:
        assert len(tuning.buckets) > 3 and all(len(bucket.candidates) == 1 for bucket in tuning.buckets)
        assert {bucket.reason for bucket in tuning.buckets} == {"comm.algorithm=flat"}
    elif hosts == "aabb":
        assert {candidate.plan.name for candidate in candidates} == {"flat", "hierarchical", "torus"}
    if len(set(hosts)) > 1:
        for link in tuning.links.values():
            assert link.alpha_s >= 0 and link.alpha_s + link.beta_s_per_byte + link.gamma_s_per_byte > 0


def run_twice(world: World, folder: str, changes: bool) -> dict[str, Any]:
    """Stop after three steps and resume, optionally with a changed plan in between."""
    config = small_run("train.epochs=2", f"run.dir={folder}", "checkpoint.every_steps=1")
    data = load_data_set(config.data)
    with on_hosts(world, "ab"):
        asked = iter(range(100))
        training = ready_to_train(config, data, world, stop_requested=lambda: next(asked) >= 2)
        train_and_record(config, decide_start(config, "auto", world), training)
        first = training.gradients.plans.tuning
        if changes and world.rank == 0:  # simulates a different choice
            for path in [Path(folder, "plan.json"), *Path(folder, "checkpoints").glob("step-*/state.json")]:
                path.write_text(path.read_text().replace('"reason":"', '"reason":"of old: '))
        stored = find_stored(decide_start(config, "auto", world), world).tuning
        again = ready_to_train(config, data, world, stored=stored)
        train_and_record(config, decide_start(config, "auto", world), again)
    assert first is not None and again.gradients.plans.tuning is not None
    return {
        "first": [bucket.gradients for bucket in first.buckets],
        "again": [bucket.gradients for bucket in again.gradients.plans.tuning.buckets],
        "reasons": [bucket.reason for bucket in again.gradients.plans.tuning.buckets],
        "drift": again.gradients.plans.drift,
    }


def test_resumed_run_keeps_its_plan_and_measures_drift(ranks: RankPool, tmp_path: Path) -> None:
    if ranks.size < 2 or ranks.device != "cpu":
        pytest.skip("needs more ranks, or shared memory")
    results = ranks.run(run_twice, str(tmp_path / "run"), True, num_ranks=2)
    for result in results:
        assert result["again"] == result["first"]
        assert all(reason.startswith("of old: ") for reason in result["reasons"])
        assert result["drift"] > 0 and result["drift"] == results[0]["drift"]
    assert "of old: " in (tmp_path / "run/plan.json").read_text()
