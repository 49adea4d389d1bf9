"""What ranks tell each other outside of collectives, through the store at which they found each other.

A rank that fails takes the others with it: they see a broken connection.  The first one to fail says so here, before it
leaves, and alone speaks to the user.  The run's folder is set here too, for the one that logs and for restarted ranks.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megabatch.errors import UserError
from megabatch.ranks.discover import RankInfo, rendezvous_address

TIMEOUT_S = 300.0  # as the store's own
RUN_FOLDER, USER_ERROR = "run-folder", "user-error"  # keys


class RankStore:
    def __init__(self, info: RankInfo) -> None:
        self.lasting = open_store(info)  # torchrun's outlives its ranks
        # Restarted ranks must not find the addresses of those before.
        self.store = dist.PrefixStore(agree_on_name(self.lasting, info), self.lasting)  # type: ignore[attr-defined]
        self.is_first: bool | None = None

    def is_first_to_fail(self) -> bool:
        """Asked by a rank that fails, first of all while the others still trust it."""
        if self.is_first is None:
            try:
                self.is_first = self.store.add("failures", 1) == 1
            except RuntimeError:  # rank 0 held the store, and is gone: it has spoken, or its launcher does
                self.is_first = False
        return self.is_first

    @contextmanager
    def failures_announced(self) -> Iterator[None]:
        """An error inside is announced before it leaves: that a user's mistake was made, for restarted ranks too."""
        try:
            yield
        except BaseException as error:
            if self.is_first_to_fail() and isinstance(error, UserError):
                self.set(USER_ERROR, str(error))
            raise

    def set(self, key: str, text: str) -> None:
        """For this attempt and later ones."""
        self.lasting.set(key, text)

    def get(self, key: str) -> str | None:
        try:
            return self.lasting.get(key).decode() if self.lasting.check([key]) else None
        except RuntimeError:
            return None

    def run_folder(self) -> Path | None:
        """The run's folder, where it is known and this host sees it."""
        path = self.get(RUN_FOLDER)
        return Path(path) if path and Path(path).is_dir() else None


def agree_on_name(store: "dist.Store", info: RankInfo, timeout_s: float = TIMEOUT_S) -> str:  # type: ignore[name-defined]
    """A name for this attempt, which rank 0 gives.

    What earlier ranks have left in the store must not be taken for an answer, and torchrun's count of restarts differs
    between hosts (it leaves out those that another host has caused).  So each rank asks with a word of its own.
    """
    own = uuid.uuid4().hex
    if info.rank != 0:
        store.set(f"hello/{info.rank}", own)
        name = str(store.get(f"welcome/{own}").decode())  # waits
        store.set(f"thanks/{name}/{info.rank}", "")
        return name
    waiting = set(range(1, info.num_ranks))
    deadline_s = time.monotonic() + timeout_s
    while waiting:
        if time.monotonic() > deadline_s:
            ranks = ", ".join(map(str, sorted(waiting)[:8]))
            raise TimeoutError(
                f"of {info.num_ranks} ranks {ranks} did not come within {timeout_s:g} s; see their output"
            )
        for rank in sorted(waiting):
            if store.check([f"hello/{rank}"]):  # maybe of a rank that is no more; then a new one follows
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", own)
            if store.check([f"thanks/{own}/{rank}"]):
                waiting.discard(rank)
        time.sleep(0.01)
    return own


def open_store(info: RankInfo) -> "dist.Store":  # type: ignore[name-defined]
    """Where the ranks find each other: torchrun's own store, or one that rank 0 opens."""
    if info.num_ranks == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if dist.is_torchelastic_launched():
        return next(dist.rendezvous("env://", info.rank, info.num_ranks))[0]  # type: ignore[attr-defined]
    host, port = rendezvous_address(info)
    return dist.TCPStore(host, port, info.num_ranks, is_master=info.rank == 0)  # type: ignore[attr-defined]
