"""The ranks of a run, and the collectives that the trainer calls directly.

A single rank has a process group too, so no code asks how many ranks there are.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from megabatch.errors import NotSaved, UserError
from megabatch.planning.topology import Topology
from megabatch.ranks import collectives
from megabatch.ranks.backends import BACKENDS, Backend
from megabatch.ranks.collectives import Difference
from megabatch.ranks.devices import require_separate_devices, set_rank_device
from megabatch.ranks.discover import RankInfo, discover
from megabatch.ranks.failures import PeerFailed
from megabatch.ranks.machine import enable_keepalive, on_interface
from megabatch.ranks.store import (
    RankStore,
    await_end,
    find_interface,
    gather_via_store,
    locate,
    report_end,
    wait_for_keys,
)
from megabatch.telemetry.activity import START_UP_TIMEOUT_S, Activity, ExitReporter
from megabatch.torch_api import abort_process_groups, default_store

POLL_S = 1.0  # between looks for the failure of another rank
GRACE_S = 3.0  # for the all-reduce to report it, which knows more
LEFT_WITHIN_S = 10.0  # for a rank on an accelerator to leave after an error; then its process ends


Value = TypeVar("Value")
REQUIRE_EVERY_S = 0.2  # while the ranks connect


class FirstRankFailed(RuntimeError):
    """Rank 0 failed to compute a value for all ranks; rank 0 reports the cause."""


class Rank0Result(Struct, frozen=True):
    """The result of `World.from_rank_0` on rank 0: a value or an error message."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    problem: str | None = None
    is_users: bool = False  # the problem is a UserError


class World:
    """This rank and its connection to the others. Resources in `closing` are closed before the rank disconnects."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        device: torch.device,
        backend: Backend | None = None,  # None: the default of the device
        topology: Topology | None = None,  # None: ranks exchange their hosts
        activity: Activity | None = None,
        exit_reporter: ExitReporter | None = None,
    ) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.backend, self.topology = backend or BACKENDS[device.type], topology
        self.activity = activity or Activity(START_UP_TIMEOUT_S, is_followed=False)
        self.exit_reporter = exit_reporter or ExitReporter(rank)
        self.closing = ExitStack()
        # Names the ranks that were lost, once the all-reduce of gradients watches them.
        self.explain: Callable[[BaseException], BaseException] = unchanged

        # Called on accelerators with the first error of this rank, before anything is closed.
        self.leaving: list[Callable[[BaseException], None]] = []
        self.owns_process_group = False  # `connect` created it, not the script
        self.has_left = threading.Event()  # this rank has disconnected
        self.aborting: threading.Thread | None = None

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Report an error before it leaves this context, so that the other ranks do not wait for this one."""
        try:
            yield
        except GeneratorExit:  # not an error: the rest is not wanted
            raise
        except BaseException as error:
            self.announce(error)
            raise

    def announce(self, error: BaseException) -> None:
        """Report an error before any cleanup.  On accelerators, also end collectives that would block it."""
        self.exit_reporter.announce(error)
        if self.owns_process_group and self.may_wait_forever and self.aborting is None:
            self.abort(error)
            threading.Thread(target=self.end_unless_left, args=(error,), daemon=True).start()

    @property
    def may_wait_forever(self) -> bool:
        """Whether no collective notices that another rank is gone."""
        return self.device.type != "cpu" and self.num_ranks > 1

    def abort(self, error: BaseException) -> None:
        """End all collectives of this rank on its device.  Nothing here waits: NCCL's abort may take forever."""
        self.aborting = threading.Thread(target=abort_default_groups, daemon=True)
        self.aborting.start()
        for leave in self.leaving:
            leave(error)

    def end_unless_left(self, error: BaseException) -> None:
        if not self.has_left.wait(LEFT_WITHIN_S):
            self.exit_reporter.end_process(error)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Record that the rank waits for the others in this context, and name lost ranks if its collective fails.

        On an accelerator a collective returns before it is done, and the host waits for its result.
        """
        self.synchronize()  # until here the other ranks wait for this one
        with self.activity.waiting():
            try:
                yield
                self.synchronize()
            except RuntimeError as error:
                explained = self.explain(error)
                if explained is error:
                    raise
                raise explained from error

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the tensor in place over all ranks; the result is bitwise identical on each."""
        with self.collective():
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.collective():
            largest: list[float] = collectives.all_reduce_max(own).tolist()
        return largest

    def barrier(self) -> None:
        """Wait until all ranks have reached this call."""
        self.all_reduce_max([0.0])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor [ranks, n] of the n values of each rank. Use it for small tensors: all ranks get all."""
        with self.collective():
            return collectives.gather(tensor)

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        with self.collective():
            return collectives.gather_numbers(numbers, self.device)

    def all_gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return the values of all ranks in rank order. They are sent as JSON, so use it rarely or for small values."""
        with self.collective():
            texts = collectives.gather_texts(msgspec.json.encode(value).decode(), self.device)
        return [msgspec.json.decode(text, type=kind) for text in texts]

    def gather_among(self, ranks: Sequence[int], text: str) -> list[str]:
        """Return the texts of `ranks`, which include this one. Only these ranks take part: it uses the store."""
        return gather_via_store(default_store(), self.rank, ranks, text)

    def from_first(self, ranks: Sequence[int], text: str | None) -> str:
        """Return the text of the first of these ranks, the only one that passes one. Only they take part.

        All of them must call this equally often, with the same ranks.
        """
        store = default_store()
        key = f"from-first/{store.add(f'asked-by/{self.rank}', 1)}/{ranks[0]}"
        if text is not None:
            store.set(key, text)
            return text
        with self.activity.waiting():
            if not wait_for_keys(store, [key], self.activity.patience_s):
                raise TimeoutError(f"rank {ranks[0]} did not read the data set within {self.activity.patience_s:g} s")
            return str(store.get(key).decode())

    def first_difference(self, text: str) -> Difference | None:
        """Compare a text that should be the same on all ranks; return None if it is."""
        with self.collective():
            return collectives.first_difference(text, self.device)

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on all ranks."""
        with self.collective():
            return collectives.broadcast_text(text, self.device)

    def broadcast_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return rank 0's tensors on the devices of all ranks; the argument of the other ranks is ignored.

        The results share one allocation: clone the ones that you keep.
        """
        with self.collective():
            return collectives.broadcast_tensors(tensors, self.device)

    def from_rank_0(self, make: Callable[[], Value], kind: type[Value]) -> Value:
        """Return the result of `make()` on rank 0 to all ranks, as JSON. If it raises there, all ranks raise."""
        outcome, error = Rank0Result(), None
        if self.rank == 0:
            try:
                outcome = Rank0Result(msgspec.Raw(msgspec.json.encode(make())))
            except Exception as caught:
                error, outcome = caught, failed_outcome(caught)
        shared = self.broadcast_text(msgspec.json.encode(outcome).decode())
        if error:
            raise error
        outcome = msgspec.json.decode(shared, type=Rank0Result)
        if outcome.problem is not None:
            raise (UserError if outcome.is_users else FirstRankFailed)(outcome.problem)
        return msgspec.json.decode(outcome.value, type=kind)

    @contextmanager
    def rank_0_leaves_first(self) -> Iterator[None]:
        """Make the other ranks wait at the end of this context until rank 0 has saved. They fail if rank 0 failed.

        Some launchers kill all ranks when the first one exits with a code other than 0, and ranks that were asked to
        stop do so. A rank that fails does not wait. The others wait for at most `Activity.patience_s`, or until the
        store is gone, which may be in rank 0's process.
        """
        if self.num_ranks == 1:
            yield
            return
        store = default_store()
        key = f"end/{store.add(f'ends-of/{self.rank}', 1)}"  # a script may train several times
        try:
            yield
        except BaseException as error:
            self.announce(error)  # before the others see that rank 0 left
            if self.rank == 0:
                waits = isinstance(error, NotSaved)  # only then are the other ranks at the end too
                report_end(store, key, self.num_ranks, msgspec.json.encode(failed_outcome(error)).decode(), waits)
            raise
        if self.rank == 0:
            report_end(store, key, self.num_ranks, msgspec.json.encode(Rank0Result()).decode())
            return
        with self.activity.waiting():
            reported = await_end(store, key, self.activity.patience_s)
        if reported is None:
            raise FirstRankFailed(
                f"rank 0 was lost, or did not report within {self.activity.patience_s:g} s that the run is saved; "
                "see its output; the same command resumes from the newest checkpoint"
            )
        outcome = msgspec.json.decode(reported, type=Rank0Result)
        if outcome.problem is not None:
            raise (NotSaved if outcome.is_users else FirstRankFailed)(outcome.problem)


def unchanged(error: BaseException) -> BaseException:
    return error


def failed_outcome(error: BaseException) -> Rank0Result:
    problem = str(error).partition("\n")[0]
    return Rank0Result(problem=problem or type(error).__name__, is_users=isinstance(error, UserError))


def current_rank() -> RankInfo:
    """Return the rank of this process. If the script called init_process_group, all ranks must call this."""
    if dist.is_initialized():
        return locate(default_store(), RankInfo(dist.get_rank(), dist.get_world_size()))
    return discover() or RankInfo(0, 1, 0, 1)


def run_interruptibly(work: Callable[[], None], require: Callable[[], None] | None) -> None:
    """Run `work` in a thread and call `require` meanwhile. If `require` raises, abandon the thread.

    `work` may block in C++, and Python runs no signal handler until it returns.
    """
    if require is None:
        work()
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="megabatch connects", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(REQUIRE_EVERY_S)
        if thread.is_alive():
            require()
    if errors:
        raise errors[0]


@contextmanager
def connect(
    info: RankInfo,
    device_type: str,
    store: RankStore | None = None,  # None: the ranks rendezvous through the environment
    timeout_s: float = START_UP_TIMEOUT_S,
    backend: Backend | None = None,
    topology: Topology | None = None,
    activity: Activity | None = None,  # None: not recorded
    require: Callable[[], None] | None = None,  # called while torch connects; raises if that is in vain
) -> Iterator[World]:
    """Connect this rank to the others in this context. A process group that the script created stays open."""
    activity = activity or Activity(timeout_s, is_followed=False)
    if dist.is_initialized():
        device = set_rank_device(info, device_type)
        world = World(info.rank, info.num_ranks, device, backend, topology, activity)
        with activity.interruptible(), world.closing:
            yield world
        return
    store = store or RankStore(info)
    info = store.info
    try:
        device = set_rank_device(info, device_type)
        require_separate_devices(store.store, info, device)
    except UserError as error:
        store.exit_reporter.announce(error)
        raise
    world = World(info.rank, info.num_ranks, device, backend, topology, activity, store.exit_reporter)
    world.owns_process_group = True

    def init_process_group() -> None:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)  # of this thread
        dist.init_process_group(
            world.backend.name,
            rank=info.rank,
            world_size=info.num_ranks,
            store=store.store,
            timeout=timedelta(seconds=activity.patience_s),
            device_id=None if device.type == "cpu" else device,
        )

    def require_all() -> None:
        if require:
            require()
        store.require_peers()

    uses_gloo = BACKENDS["cpu"].name in world.backend.name  # also if it is one of two, as in a self-test
    has_choice = uses_gloo and not info.is_single_node and not os.environ.get("GLOO_SOCKET_IFNAME")
    interface = find_interface(store.store, info) if has_choice else None
    with on_interface(info.is_single_node, interface), activity.interruptible():
        run_interruptibly(init_process_group, require_all if info.num_ranks > 1 else require)
        try:
            enable_keepalive()
            with leaving_with_others(world, store), world.closing, world.announcing():
                yield world
        finally:
            disconnect(world)


def disconnect(world: World) -> None:
    """Destroy the process group, unless this rank failed on an accelerator: NCCL would wait for all other ranks."""
    if world.aborting is None:
        gc.collect()  # free unreferenced groups first, while their threads can still end in order
        if dist.is_initialized():
            dist.destroy_process_group()
    elif world.exit_reporter.ends_process:
        return
    else:
        world.aborting.join()  # while `end_unless_left` waits
    world.has_left.set()


@contextmanager
def leaving_with_others(world: World, store: RankStore) -> Iterator[None]:
    """Leave on an accelerator when another rank fails: NCCL does not detect that, and collectives wait forever."""
    if not world.may_wait_forever:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=watch_others, args=(world, store, ended), name="megabatch peers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(POLL_S)


def watch_others(world: World, store: RankStore, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # the store is gone, with the rank that had it
        while not store.has_other_failed():
            if ended.wait(POLL_S):
                return
    if ended.wait(GRACE_S) or store.is_first is not None:
        return
    error = PeerFailed("another rank failed and reports the cause; this one was waiting for it")
    world.activity.interrupt(error)  # before it reads results of collectives that were aborted
    world.abort(error)
    world.end_unless_left(error)


def abort_default_groups() -> None:
    with suppress(RuntimeError, ValueError, AssertionError):  # they do not exist yet, or another thread aborted them
        abort_process_groups()
