"""The ranks of a run, and the few collectives that the trainer asks of them directly.

One rank is the general case made small: it has a process group of its own, and nobody asks how many there are.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from megabatch.errors import NotSaved, UserError, require_one_of
from megabatch.planning.topology import Topology
from megabatch.ranks import collectives
from megabatch.ranks.backends import BACKENDS, Backend
from megabatch.ranks.collectives import Difference
from megabatch.ranks.discover import RankInfo, discover
from megabatch.ranks.machine import notice_lost_hosts, on_loopback
from megabatch.ranks.store import RankStore, await_end, gather_through, locate, report_end
from megabatch.telemetry.activity import START_UP_TIMEOUT_S, Activity, LastWords
from megabatch.torch_api import default_store

# Which of the devices that a process sees is its own.


def choose_index(local_rank: int, num_local_ranks: int, num_visible: int) -> int:
    """Launchers let every rank see all devices of its host, or one of its own (srun --gpus-per-task=1)."""
    if num_visible == 1:
        return 0
    if num_local_ranks > num_visible:
        raise UserError(
            f"{num_local_ranks} ranks on this host see {num_visible} devices, and each needs one of its own; "
            f"nearest: {num_visible} ranks on a host"
        )
    return local_rank % num_visible


Value = TypeVar("Value")


class FirstRankFailed(RuntimeError):
    """Rank 0 could not make what all ranks need; it says why itself."""


class Outcome(Struct, frozen=True):
    """Of what rank 0 makes for all ranks."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    problem: str | None = None
    is_users: bool = False  # the problem


def choose_device(name: str) -> str:
    """`auto` is the accelerator, where there is one that we have a backend for."""
    require_one_of("run.device", name, ["auto", *BACKENDS])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator else "cpu"
    if name == "auto":
        return found if found in BACKENDS else "cpu"
    if name not in ("cpu", found):
        raise UserError(f"run.device={name!r}, but torch finds no {name.upper()} device here; nearest: run.device=cpu")
    return name


class World:
    """This rank among all ranks.  What is opened on it (`closing`) is closed before it leaves them."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        device: torch.device,
        backend: Backend | None = None,  # that of the device
        topology: Topology | None = None,  # None: ranks ask each other for their hosts
        activity: Activity | None = None,
        last_words: LastWords | None = None,
    ) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.backend, self.topology = backend or BACKENDS[device.type], topology
        self.activity = activity or Activity(START_UP_TIMEOUT_S, is_followed=False)
        self.last_words = last_words or LastWords(rank)
        self.closing = ExitStack()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over all ranks; bitwise the same on each."""
        with self.activity.waiting():
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Of each value, the largest that a rank has brought."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.activity.waiting():
            largest: list[float] = collectives.all_reduce_max(own).tolist()
        return largest

    def barrier(self) -> None:
        """Ranks leave it at about the same time."""
        self.all_reduce_max([0.0])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[ranks, n], of the n values that each rank brings: small ones, since each rank gets all of them."""
        with self.activity.waiting():
            return collectives.gather(tensor)

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        with self.activity.waiting():
            return collectives.gather_numbers(numbers, self.device)

    def all_gather(self, value: Any, kind: Any = Any) -> list[Any]:
        """The values that all ranks have brought, in rank order, on all ranks: rare or small ones, as JSON."""
        with self.activity.waiting():
            texts = collectives.gather_texts(msgspec.json.encode(value).decode(), self.device)
        return [msgspec.json.decode(text, type=kind) for text in texts]

    def gather_among(self, ranks: Sequence[int], text: str) -> list[str]:
        """The texts of these ranks, this one among them.  No other rank takes part: they travel through the store."""
        return gather_through(default_store(), self.rank, ranks, text)

    def first_difference(self, text: str) -> Difference | None:
        """Of texts that should be the same on all ranks; None if they are."""
        with self.activity.waiting():
            return collectives.first_difference(text, self.device)

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text, on all ranks."""
        with self.activity.waiting():
            return collectives.broadcast_text(text, self.device)

    def broadcast_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rank 0's tensors, on all ranks and on their devices; only rank 0 needs to bring any.

        They share one memory: copy what is kept.
        """
        return collectives.broadcast_tensors(tensors, self.device)

    def from_rank_0(self, make: Callable[[], Value], kind: type[Value]) -> Value:
        """What rank 0 makes, on all ranks, as JSON.  What it fails with, all fail with: nobody waits for it."""
        outcome, error = Outcome(), None
        if self.rank == 0:
            try:
                outcome = Outcome(msgspec.Raw(msgspec.json.encode(make())))
            except Exception as caught:
                error, outcome = caught, failure(caught)
        shared = self.broadcast_text(msgspec.json.encode(outcome).decode())
        if error:
            raise error
        outcome = msgspec.json.decode(shared, type=Outcome)
        if outcome.problem is not None:
            raise (UserError if outcome.is_users else FirstRankFailed)(outcome.problem)
        return msgspec.json.decode(outcome.value, type=kind)

    @contextmanager
    def rank_0_leaves_first(self) -> Iterator[None]:
        """Rank 0 saves inside.  The other ranks leave after it, and fail if it failed.

        Some launchers kill all ranks when the first one ends with an exit code other than 0, as ranks that were asked
        to stop do.  A rank that fails leaves at once.  The others wait for rank 0 as long as for a rank that starts
        (`Activity.patience_s`), or until the store is gone, which rank 0 may hold.
        """
        if self.num_ranks == 1:
            yield
            return
        store = default_store()
        key = f"end/{store.add(f'ends-of/{self.rank}', 1)}"  # which a script may reach several times
        try:
            yield
        except BaseException as error:
            if self.rank == 0:
                waits = isinstance(error, NotSaved)  # then the others are at the end too, and read it
                report_end(store, key, self.num_ranks, msgspec.json.encode(failure(error)).decode(), waits)
            raise
        if self.rank == 0:
            report_end(store, key, self.num_ranks, msgspec.json.encode(Outcome()).decode())
            return
        with self.activity.waiting():
            reported = await_end(store, key, self.activity.patience_s)
        if reported is None:
            raise FirstRankFailed(
                f"rank 0 was lost, or did not report within {self.activity.patience_s:g} s that the run is saved; "
                "see its output; the same command resumes from the newest checkpoint"
            )
        outcome = msgspec.json.decode(reported, type=Outcome)
        if outcome.problem is not None:
            raise (NotSaved if outcome.is_users else FirstRankFailed)(outcome.problem)


def failure(error: BaseException) -> Outcome:
    problem = str(error).partition("\n")[0]
    return Outcome(problem=problem or type(error).__name__, is_users=isinstance(error, UserError))


def current_rank() -> RankInfo:
    """Which of the ranks that exist this process is; it may be alone.  In a script that joined them, all call it."""
    if dist.is_initialized():
        return locate(default_store(), RankInfo(dist.get_rank(), dist.get_world_size()))
    return discover() or RankInfo(0, 1, 0, 1)


def own_device(info: RankInfo, device_type: str) -> torch.device:
    """The device of this rank, which is the current one from here on.  A script that has set one keeps it."""
    if device_type == "cpu":
        return torch.device("cpu")
    index = torch.accelerator.current_device_index() if dist.is_initialized() else 0
    index = index or choose_index(info.local_rank, info.num_local_ranks, torch.accelerator.device_count())
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


@contextmanager
def connect(
    info: RankInfo,
    device_type: str,
    store: "dist.Store | None" = None,  # type: ignore[name-defined]
    timeout_s: float = START_UP_TIMEOUT_S,
    backend: Backend | None = None,
    topology: Topology | None = None,
    activity: Activity | None = None,  # None: nobody follows it
    last_words: LastWords | None = None,
) -> Iterator[World]:
    """Joins the ranks, and leaves them at the end.  A script that has joined them already stays joined."""
    if store is None and not dist.is_initialized():
        met = RankStore(info)
        info, store = met.info, met.store
    device = own_device(info, device_type)
    activity = activity or Activity(timeout_s, is_followed=False)
    world = World(info.rank, info.num_ranks, device, backend, topology, activity, last_words)
    if dist.is_initialized():
        with activity.interruptible(), world.closing:
            yield world
        return
    with on_loopback(info.is_alone):
        dist.init_process_group(
            world.backend.name,
            rank=info.rank,
            world_size=info.num_ranks,
            store=store,
            timeout=timedelta(seconds=activity.patience_s),
            device_id=None if device.type == "cpu" else device,
        )
        try:
            notice_lost_hosts()
            with activity.interruptible(), world.closing:
                yield world
        finally:
            gc.collect()  # what nobody holds any more goes before the group, while its threads can still end in order
            dist.destroy_process_group()
