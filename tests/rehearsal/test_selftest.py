"""`megabatch selftest` on a device that rounds like the CPU."""

import gc
import getpass
import os
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megabatch_lab.rehearsal import fake_cuda
from megabatch_lab.rehearsal.backends import REHEARSED
from megabatch_lab.rehearsal.device_decoder import NAME

from megabatch.planning.topology import regular
from megabatch.preflight.selftest import checks, measurements
from megabatch.preflight.selftest.results import Check, Job, RanksDisagree, SelfTest, run_jobs
from megabatch.preflight.selftest.run import backend_of_both, run_selftest, two_nodes
from megabatch.ranks.backends import BACKENDS
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World
from megabatch.torch_api import default_store
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import alone, on

TINY = measurements.Workload(
    ["model.name=small_resnet", "model.options.width=4", "data.image_size=12"], 4, (2,), ("fp16",), 16
)


def run_on_one(_: None) -> tuple[SelfTest, list[int]]:
    info, progress = RankInfo(0, 1, 0, 1), list[int]()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the fake CUDA has already started
    gc.collect()  # events of other tests on other devices, whose end would create contexts
    fake_cuda.reset()
    checks.TOLERANCE = {"fp16": 0.0}
    measurements.ON_GPU, measurements.ROUNDED = TINY, 1 << 10
    measurements.ALL_REDUCED = (1, 1 << 10)  # type: ignore[assignment]
    measurements.INPUT_S, measurements.JPEGS, measurements.ROUNDS, measurements.TIMED_STEPS = 0.2, 8, 1, 2
    checks.STEPS, checks.STOPPED_AFTER = 3, 2
    report = run_selftest(info, RankStore(info), "cuda", False, lambda r: progress.append(len(r.checks)), REHEARSED)
    return report, progress


def test_every_check_passes_bitwise_and_the_report_is_anonymous(ranks: RankPool) -> None:
    ((report, progress),) = ranks.run(run_on_one, num_ranks=1, timeout_s=180.0, join=alone)
    # The fake CUDA has no compiler.  The failure does not stop the checks that follow.
    failed = [check.name for check in report.failed]
    assert failed == ["fp16 compiled, microbatch 2"], report.failed
    assert all(check.found.startswith("UserError: model.compile=true") for check in report.failed)
    assert progress == sorted(set(progress)) and progress[-1] == len(report.checks)
    found = {check.name: check for check in report.checks}
    passed = {name for name, check in found.items() if check.passed}
    assert {"all-reduce torus, comm dtype fp16", "training fp16, lars", "training fp16, sgd", "resume fp16"} <= passed
    assert {
        f"CUDA context only on the rank's device, after {when}" for when in ("training and saving", "decoding")
    } <= passed
    assert {"all-reduce of 4 KiB in backward", "all-reduce of 25 MiB, comm dtype bf16"} <= passed
    assert found["waits and launches per step"].passed is not False
    for name in (
        "fp16, microbatch 2",
        "fp16 in CUDA graphs, microbatch 2",
        "JPEG input",
        f"JPEG input, decoded by {NAME}",
    ):
        assert found[name].figures["images_per_s"] > 0
    assert not any("not run" in check.found for check in report.checks)
    text = msgspec.json.encode(report).decode()
    assert not any(word in text for word in (platform.node(), str(Path.home()), f"/{getpass.getuser()}", "/tmp"))


def run_small_jobs(world: World) -> tuple[list[Any], list[str]]:
    """Run jobs that fail on all ranks and on one; return the checks and the errors of the attempts that ended."""
    shared, errors = default_store(), []

    def job(name: str, failing: tuple[int, ...] = (), is_measurement: bool = False) -> Job:
        def run(name: str) -> list[Check]:
            if world.rank in failing:
                raise ValueError(f"a problem in {Path.home()}/secret/file")
            if name == "no memory":
                raise torch.OutOfMemoryError(f"GPU {world.rank} has {world.rank + 1} GiB free")
            return [Check(name=name, passed=True, found="fine")]

        return Job(name, run, is_measurement)

    jobs = [job("first"), job("all fail", (0, 1)), job("second"), job("one fails", (1,)), job("third")]
    jobs.append(job("no memory"))
    jobs += [job("late", is_measurement=True)]

    def get(key: str) -> str | None:
        return shared.get(key).decode() if shared.check([key]) else None

    newest = SelfTest(megabatch="", torch="", device="", backend="", num_ranks=2, hosts_of=[2])
    for attempt in range(2):
        of_attempt = dist.PrefixStore(str(attempt), shared)  # type: ignore[attr-defined]
        store: Any = SimpleNamespace(store=of_attempt, get=get, set=shared.set)
        try:
            for results in run_jobs(jobs, newest, world, store, budget_s=0.0):
                newest = results
            break
        except RanksDisagree as error:
            errors.append(str(error))
    return [(check.name, check.passed, check.found) for check in newest.checks], errors


def test_failed_check_does_not_stop_the_others(ranks: RankPool) -> None:
    results = ranks.run(run_small_jobs, num_ranks=2, join=on("cpu"))
    for rank, (checked, errors) in enumerate(results):
        require_each_check(rank, checked, errors)


def require_each_check(rank: int, checked: list[Any], errors: list[str]) -> None:
    problem = "ValueError: a problem in .../secret/file"
    assert checked == [
        ("first", True, "fine"),
        ("all fail", False, problem),
        ("second", True, "fine"),
        ("one fails", False, f"failed on rank 1: {problem}"),
        ("third", True, "fine"),
        ("no memory", False, f"OutOfMemoryError: GPU {rank} has {rank + 1} GiB free"),
        ("late", None, "not run: 0 s were over"),
    ]
    assert errors == [f"selftest, one fails: failed on rank 1: {problem}"]


def test_communicators_are_made_as_in_training() -> None:
    backend = backend_of_both("cuda")
    assert backend[1:] == BACKENDS["cuda"][1:] and backend.name == f"cpu:gloo,cuda:{BACKENDS['cuda'].name}"


def test_only_a_single_node_is_taken_for_two() -> None:
    on_one, on_four = RankInfo(0, 8, 0, 8), RankInfo(0, 32, 0, 8)
    assert two_nodes(on_one) == regular(2, 4) and two_nodes(on_four) is None
    assert two_nodes(RankInfo(0, 2, 0, 2)) is None and two_nodes(RankInfo(0, 5, 0, 5)) is None
