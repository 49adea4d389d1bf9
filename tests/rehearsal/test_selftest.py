"""`megabatch selftest` on a device that rounds like the CPU."""

import gc
import getpass
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from megabatch_lab.rehearsal import backends, fake_cuda
from megabatch_lab.rehearsal.backends import REHEARSED
from megabatch_lab.rehearsal.device_decoder import NAME

from megabatch.cli.selftest import RESTARTS
from megabatch.comm.settings import CommSettings
from megabatch.errors import UserError
from megabatch.planning.plan import COMM_DTYPES
from megabatch.planning.topology import regular
from megabatch.preflight.selftest import checks, measurements, photos, results
from megabatch.preflight.selftest.checks import jobs_of_checks
from megabatch.preflight.selftest.measurements import jobs_of_measurements
from megabatch.preflight.selftest.results import Check, CheckJob, RanksDisagree, SelfTest, count_start, run_jobs
from megabatch.preflight.selftest.run import backend_of_both, run_selftest, two_nodes
from megabatch.ranks.backends import BACKENDS
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World
from megabatch.torch_api import default_store
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import alone, on

TINY = measurements.Workload(
    ["model.name=small_resnet", "model.options.width=4", "data.image_size=12"], 4, (2,), ("fp16",)
)

SMALL = ["model.name=small_resnet", "model.options.width=4", "batch.micro=8", "train.steps=3"]
SMALL += ["data.synthetic.train=128", "data.synthetic.test=8"]


def shrink() -> None:
    """Use as little work as possible in this rank."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the fake CUDA has already started
    gc.collect()  # events of other tests on other devices, whose end would create contexts
    fake_cuda.reset()
    measurements.ON_GPU = TINY
    checks.ALL_REDUCED, checks.IN_16_BITS = (1, 1 << 10), 1 << 10  # type: ignore[assignment]
    measurements.ALL_REDUCED = checks.ALL_REDUCED
    photos.JPEGS, photos.IMAGE_SIZE, measurements.INPUT_S = 8, 16, 0.2
    measurements.ROUNDS, measurements.REPEATS, measurements.TIMED_STEPS = 1, 2, 2
    checks.SMALL, checks.STOPPED_AFTER = SMALL, 2


def run_on_one(_: None) -> tuple[SelfTest, list[int]]:
    info, progress = RankInfo(0, 1, 0, 1), list[int]()
    shrink()
    checks.TOLERANCE = {"fp16": 0.0}
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
    assert {f"CUDA context only on the rank's device, after {when}" for when in ("training", "decoding")} <= passed
    assert {"all-reduce of 4 bytes", "all-reduce of 4 KiB", "no host waits in a step"} <= passed
    assert report.backend_class == "Rehearsed"
    for name in (
        "fp16, microbatch 2",
        "fp16 in CUDA graphs, microbatch 2",
        "JPEG input",
        f"JPEG input, decoded by {NAME}",
    ):
        assert found[name].measurements["images_per_s"] > 0
    assert found["all-reduce of 4 KiB in backward"].measurements.keys() >= {"ours_s", "stock_ddp_s", "backend_s"}
    assert not any("not run" in check.found for check in report.checks)
    text = msgspec.json.encode(report).decode()
    assert not any(word in text for word in (platform.node(), str(Path.home()), f"/{getpass.getuser()}", "/tmp"))


def join_four(rank: int, num_ranks: int, store: str) -> AbstractContextManager[tuple[RankInfo, RankStore]]:
    info, file = RankInfo(rank, num_ranks, rank, num_ranks), dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
    return nullcontext((info, RankStore(info, file)))


def run_on_four(place: tuple[RankInfo, RankStore]) -> SelfTest:
    shrink()
    checks.COMM_DTYPES = {dtype: COMM_DTYPES[dtype] for dtype in ("same", "fp16")}  # type: ignore[attr-defined]
    checks.TOLERANCE, checks.OPTIMIZERS = {"fp32": 2e-3, "fp16": 3e-2}, {"lars": "5"}
    checks.check_contexts_of_decoding = checks.check_contexts  # the decoder's process runs in the test on one rank
    return run_selftest(*place, "cuda", True, lambda report: None, REHEARSED)


def test_every_check_passes_on_two_nodes_of_two_ranks(ranks: RankPool) -> None:
    reports = ranks.run(run_on_four, num_ranks=4, timeout_s=180.0, join=join_four)
    assert all(not report.failed for report in reports), reports[0].failed
    assert reports[0].hosts_of == [2, 2] and reports[0].is_simulated
    plans = {check.measurements["plan"] for check in reports[0].checks if check.name.startswith("all-reduce torus")}
    assert len(plans) == 2 and all("between nodes" in plan for plan in plans), plans
    assert sum(check.passed is True for check in reports[0].checks) == len(reports[0].checks) == 15


def check_perturbed_sums(world: World, faulty: tuple[int, ...], amount: float) -> list[Check]:
    """Check all-reduces whose backend adds `amount` to the first sum of each call on some ranks."""
    exact = backends.combined

    def perturbed(contributions: torch.Tensor, op: Any) -> torch.Tensor:
        result = exact(contributions, op)
        if result.is_floating_point() and world.rank in faulty:
            result[0] += amount
        return result

    checks.SIZES = (5,)  # type: ignore[assignment]
    with mock.patch.object(backends, "combined", perturbed):
        settings = CommSettings(algorithm="flat", timeout_s=60.0)
        return [*checks.check_sum(world, settings, "sum"), *checks.check_equality(world, 5, "equality")]


@pytest.mark.parametrize(
    ("faulty", "amount", "passed"), [((), 0.0, True), ((2,), 2e-7, False), ((0, 1, 2, 3), 1.0, False)]
)
def test_perturbed_sum_fails(ranks: RankPool, faulty: tuple[int, ...], amount: float, passed: bool) -> None:
    """The same error on all ranks exceeds the bound; a small one on one rank makes it differ from the others."""
    for sums, equality in ranks.run(check_perturbed_sums, faulty, amount, num_ranks=4, join=on("cuda", regular(2, 2))):
        assert sums.passed is passed and (sums.measurements["num_results"] == 2) is (len(faulty) == 1)
        assert (sums.measurements["of_bound"] > 1) is (amount == 1.0)
        assert equality.passed is (len(faulty) != 1)


class Killed(BaseException):
    """The end of a rank that is killed."""


def run_small_jobs(world: World) -> tuple[list[Any], list[str]]:
    """Run jobs that fail on all ranks and on one; return the checks and the errors of the attempts that ended."""
    shared, errors = default_store(), []

    def get(key: str) -> str | None:
        return shared.get(key).decode() if shared.check([key]) else None

    def fail_on(*failing: int) -> None:
        if world.rank in failing:
            raise ValueError(f"a problem in {Path.home()}/secret/file")

    def fill_memory(*failing: int) -> None:
        if world.rank in failing:
            raise torch.OutOfMemoryError(f"GPU {world.rank} has {world.rank + 1} GiB free")

    def hang_on_rank_1() -> None:
        if world.rank == 0:
            mock.patch.object(results, "PATIENCE_S", 0.5).start()
        while world.rank == 1:
            time.sleep(0.01)
            if get(results.PROBLEM):
                raise Killed

    def end() -> None:
        raise Killed

    actions: list[tuple[str, Callable[[], object], bool]] = [
        ("too large", partial(fill_memory, 0, 1), True),
        ("first", int, False),
        ("all fail", partial(fail_on, 0, 1), False),
        ("second", int, False),
        ("one fails", partial(fail_on, 1), False),
        ("too large for one", partial(fill_memory, 1), True),
        ("third", int, False),
        ("one hangs", hang_on_rank_1, False),
        ("all end", end, False),
        ("no memory", partial(fill_memory, 0, 1), False),
        ("late", int, True),
    ]

    def run(action: Callable[[], object], name: str) -> list[Check]:
        action()
        return [Check(name=name, passed=True, found="fine")]

    jobs = [CheckJob(name, partial(run, action), is_measurement) for name, action, is_measurement in actions]
    newest = SelfTest(megabatch="", torch="", device="", backend="", num_ranks=2, hosts_of=[2])
    for attempt in range(5):
        of_attempt = dist.PrefixStore(str(attempt), shared)  # type: ignore[attr-defined]
        store: Any = SimpleNamespace(store=of_attempt, get=get, set=shared.set)
        try:
            for each in run_jobs(jobs, newest, world, store, budget_s=0.0):
                newest = each
            break
        except (RanksDisagree, Killed) as error:
            errors.append(str(error))
        finally:
            mock.patch.stopall()
    return [(check.name, check.passed, check.found) for check in newest.checks], errors


def test_failed_check_does_not_stop_the_others(ranks: RankPool) -> None:
    for rank, (checked, errors) in enumerate(ranks.run(run_small_jobs, num_ranks=2, join=on("cpu"))):
        require_each_check(rank, checked, errors)


def require_each_check(rank: int, checked: list[Any], errors: list[str]) -> None:
    problem, hangs = "ValueError: a problem in .../secret/file", "did not end on rank 1 in 0.5 s"
    assert checked == [
        ("too large", None, "does not fit into memory"),
        ("first", True, "fine"),
        ("all fail", False, problem),
        ("second", True, "fine"),
        ("one fails", False, f"failed on rank 1: {problem}"),
        ("too large for one", None, "does not fit into memory"),
        ("third", True, "fine"),
        ("one hangs", False, hangs),
        ("all end", False, "ranks ended in this check; see the output"),
        ("no memory", False, f"OutOfMemoryError: GPU {rank} has {rank + 1} GiB free"),
        ("late", None, "not run: 0 s were over"),
    ]
    full = "OutOfMemoryError: GPU 1 has 2 GiB free"
    assert errors == [
        f"selftest, one fails: failed on rank 1: {problem}",
        f"selftest, too large for one: failed on rank 1: {full}",
        f"selftest, one hangs: {hangs}" if rank == 0 else "",
        "",
    ]


def test_ranks_that_never_reach_a_check_are_not_restarted_forever() -> None:
    kept = dict[str, str]()
    store: Any = SimpleNamespace(get=kept.get, set=kept.__setitem__)
    for _ in range(results.MOST_STARTS):
        count_start(store)
    with pytest.raises(UserError, match="failed 3 times before a check began"):
        count_start(store)


def test_there_are_enough_restarts_for_a_fault_in_every_check() -> None:
    world: Any = SimpleNamespace(device=torch.device("cuda"), topology=regular(2, 8))
    assert 50 < len(jobs_of_checks(world, world)) + len(jobs_of_measurements(world)) <= RESTARTS


def test_communicators_are_made_as_in_training() -> None:
    backend = backend_of_both("cuda")
    assert backend[1:] == BACKENDS["cuda"][1:] and backend.name == f"cpu:gloo,cuda:{BACKENDS['cuda'].name}"


def test_only_a_single_node_is_taken_for_two() -> None:
    on_one, on_four = RankInfo(0, 8, 0, 8), RankInfo(0, 32, 0, 8)
    assert two_nodes(on_one) == regular(2, 4) and two_nodes(on_four) is None
    assert two_nodes(RankInfo(0, 2, 0, 2)) is None and two_nodes(RankInfo(0, 5, 0, 5)) is None
