"""Results of the self-test, and its checks as jobs that cannot stop each other.

A job ends on all ranks before the next one begins: each rank sets its outcome in the store.  If a job fails on all
ranks with the same error, the next one runs.  Otherwise collectives may be left behind, so all ranks end; the launcher
restarts them, and they continue with the next job.  The store has the results until then.
"""

import gc
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct, field
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.ranks.store import RankStore, get_all, wait_for_keys
from megabatch.ranks.world import World
from megabatch.text import one_line

PATIENCE_S = 240.0  # for the other ranks to end a job: more than the timeouts of its collectives
PATIENCE_OF_FAILED_S = 20.0  # for the other ranks to fail too; if they do not, they wait for this one
LONGEST_PROBLEM = 300  # characters
OUT_OF_MEMORY = torch.OutOfMemoryError.__name__
# Keys that outlive an attempt.
DONE, RUNNING, PROBLEM, STARTED = (f"selftest/{name}" for name in ("done", "running", "problem", "started"))
MOST_STARTS = 3  # of ranks that never reach a check


class Check(Struct, frozen=True, kw_only=True):
    name: str
    passed: bool | None  # None for a measurement
    found: str  # for the terminal
    measurements: dict[str, Any] = field(default_factory=dict, name="figures")  # by name


class SelfTest(Struct, frozen=True, kw_only=True):
    """The results of a self-test.  They contain no host or user names, no paths and no data."""

    megabatch: str
    torch: str
    device: str  # its name
    backend: str  # the name that was requested
    backend_class: str = ""  # of the default process group on the device
    software: dict[str, str] = {}  # versions of CUDA, cuDNN, NCCL and the driver
    num_ranks: int
    hosts_of: list[int]  # ranks per node in the plans
    is_simulated: bool = False  # all ranks are on one node, and the plans take it for two
    seconds: float = 0.0
    checks: list[Check] = []

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    def with_checks(self, checks: Sequence[Check], seconds: float) -> "SelfTest":
        return replace(self, checks=[*self.checks, *checks], seconds=seconds)


class CheckJob(NamedTuple):
    name: str
    run: Callable[[str], Sequence[Check]]  # with the name; all ranks call it
    is_measurement: bool = False  # left out if the time is up


class JobOutcome(Struct):
    """The end of a job on a rank."""

    problem: str = ""
    is_late: bool = False  # no time is left for further measurements


class RanksDisagree(RuntimeError):
    """A job failed on some ranks."""


def anonymous(error: BaseException | str) -> str:
    """Return the error as one line, without host names and paths."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, BaseException):
        text = f"{type(error).__name__}: {text}"
    for private in (platform.node(), str(Path.home()), gettempdir(), str(Path.cwd())):
        if len(private) > 1:
            text = text.replace(private, "...")
    return one_line(re.sub(r"(?<![\w.])/[\w.+-]+(/[\w.+-]+)+", "(path)", text), LONGEST_PROBLEM)


def count_start(store: RankStore) -> None:
    """Raise if the ranks were restarted without reaching a check.  Only rank 0 calls it."""
    starts = int(store.get(STARTED) or 0) + 1
    if starts > MOST_STARTS:
        raise UserError(f"the ranks failed {MOST_STARTS} times before a check began; please send us the errors above")
    store.set(STARTED, str(starts))


def run_jobs(
    jobs: Sequence[CheckJob], results: SelfTest, world: World, store: RankStore, budget_s: float
) -> Iterator[SelfTest]:
    """Run the jobs that an earlier attempt has not run, and yield the results so far after each."""
    earlier = world.broadcast_text(store.get(DONE) or "") if world.rank == 0 else world.broadcast_text("")
    begin_s, first = time.perf_counter(), 0
    if earlier:
        results = msgspec.json.decode(earlier, type=SelfTest)
        began_earlier_s, names = results.seconds, [job.name for job in jobs]
        stopped_in, problem = (world.broadcast_text(store.get(key) or "") for key in (RUNNING, PROBLEM))
        first = names.index(stopped_in) + 1
        problem = problem or "ranks ended in this check; see the output"
        results = results.with_checks([failed_check(jobs[first - 1], problem)], began_earlier_s)
        begin_s -= began_earlier_s
        yield results
    is_late = False
    for turn, job in enumerate(jobs[first:]):
        checks: Sequence[Check]
        if job.is_measurement and is_late:
            checks = [Check(name=job.name, passed=None, found=f"not run: {budget_s:g} s were over")]
        else:
            if world.rank == 0:
                store.set(STARTED, "0")
                store.set(PROBLEM, "")
                store.set(RUNNING, job.name)
                store.set(DONE, msgspec.json.encode(results).decode())
            checks, problem = attempt(job)
            is_late = agree(store, turn, job, world, JobOutcome(problem, time.perf_counter() - begin_s > budget_s))
            free_memory(world)
        results = results.with_checks(checks, time.perf_counter() - begin_s)
        yield results


def free_memory(world: World) -> None:
    """Free the models of a job, which the world holds to close them, so that the next job has the whole memory."""
    world.closing.close()
    gc.collect()
    if world.device.type != "cpu":
        torch.get_device_module(world.device).empty_cache()


def kind_of(problem: str) -> str:
    """Return the problem without parts that vary between ranks of the same failure: numbers, GPU memory."""
    name = problem.partition(":")[0]
    return name if OUT_OF_MEMORY in name else re.sub(r"\d+", "0", problem)


def attempt(job: CheckJob) -> tuple[Sequence[Check], str]:
    """Run a job.  An error is a failed check, with the problem as its result."""
    try:
        return job.run(job.name), ""
    except Exception as error:
        problem = anonymous(error)
        return [failed_check(job, problem)], problem


def failed_check(job: CheckJob, problem: str) -> Check:
    """Return the result of a job with a problem.  A large batch need not fit into memory to be measured."""
    if job.is_measurement and OUT_OF_MEMORY in problem:
        return Check(name=job.name, passed=None, found="does not fit into memory")
    return Check(name=job.name, passed=False, found=problem)


def agree(store: RankStore, turn: int, job: CheckJob, world: World, outcome: JobOutcome) -> bool:
    """Wait until all ranks ended the job.  Return rank 0's `is_late`; raise if the job failed on some ranks only."""
    keys = [f"selftest/{turn}/{rank}" for rank in range(world.num_ranks)]
    store.store.set(keys[world.rank], msgspec.json.encode(outcome).decode())
    patience_s = PATIENCE_OF_FAILED_S if outcome.problem else PATIENCE_S
    have_ended = wait_for_keys(store.store, keys, patience_s)
    ended = [rank for rank, key in enumerate(keys) if have_ended or store.store.check([key])]
    texts = get_all(store.store, [keys[rank] for rank in ended])
    outcomes = {rank: msgspec.json.decode(text, type=JobOutcome) for rank, text in zip(ended, texts, strict=True)}
    failed = {rank: each.problem for rank, each in outcomes.items() if each.problem}
    is_alike = len(failed) == world.num_ranks and len(set(map(kind_of, failed.values()))) == 1
    if have_ended and (not failed or is_alike):
        return outcomes[0].is_late
    rank, problem = next(iter(failed.items()), (min({*range(world.num_ranks)} - {*ended}, default=0), ""))
    problem = f"failed on rank {rank}: {problem}" if problem else f"did not end on rank {rank} in {patience_s:g} s"
    store.set(PROBLEM, problem)
    raise RanksDisagree(f"selftest, {job.name}: {problem}")
