"""What ranks tell each other outside of collectives, through the store at which they met.

A rank that fails takes the others with it: they see a broken connection.  The first one to fail says so here, before it
leaves, and alone speaks to the user.  The run's folder is told here too, to the one that logs and to restarted ranks.
"""

import time
import uuid
from pathlib import Path

import torch.distributed as dist

from megabatch.ranks.discover import Place, meeting_point

TIMEOUT_S = 300.0  # as the store's own
FOLDER, MISTAKE = "folder", "mistake"  # what is told


class Notices:
    def __init__(self, place: Place) -> None:
        self.lasting = open_store(place)  # torchrun's outlives its ranks
        # Restarted ranks must not find the addresses of those before.
        self.store = dist.PrefixStore(agree_on_name(self.lasting, place), self.lasting)  # type: ignore[attr-defined]
        self.is_first: bool | None = None

    def is_first_to_fail(self) -> bool:
        """Asked by a rank that fails, first of all while the others still trust it."""
        if self.is_first is None:
            try:
                self.is_first = self.store.add("failures", 1) == 1
            except RuntimeError:  # rank 0 held the store, and is gone: it has spoken, or its launcher does
                self.is_first = False
        return self.is_first

    def tell(self, key: str, text: str) -> None:
        """For this attempt and later ones."""
        self.lasting.set(key, text)

    def told(self, key: str) -> str | None:
        try:
            return self.lasting.get(key).decode() if self.lasting.check([key]) else None
        except RuntimeError:
            return None

    def folder(self) -> Path | None:
        """The run's folder, where it is known and this host sees it."""
        told = self.told(FOLDER)
        return Path(told) if told and Path(told).is_dir() else None


def agree_on_name(store: "dist.Store", place: Place, timeout_s: float = TIMEOUT_S) -> str:  # type: ignore[name-defined]
    """A name for this meeting, which rank 0 gives.

    What earlier ranks have left in the store must not be taken for an answer, and torchrun's count of restarts differs
    between hosts (it leaves out those that another host has caused).  So each rank asks with a word of its own.
    """
    own = uuid.uuid4().hex
    if place.rank != 0:
        store.set(f"hello/{place.rank}", own)
        name = str(store.get(f"welcome/{own}").decode())  # waits
        store.set(f"thanks/{name}/{place.rank}", "")
        return name
    waiting = set(range(1, place.num_ranks))
    deadline_s = time.monotonic() + timeout_s
    while waiting:
        if time.monotonic() > deadline_s:
            ranks = ", ".join(map(str, sorted(waiting)[:8]))
            raise TimeoutError(
                f"of {place.num_ranks} ranks {ranks} did not come within {timeout_s:g} s; see their output"
            )
        for rank in sorted(waiting):
            if store.check([f"hello/{rank}"]):  # maybe of a rank that is no more; then a new one follows
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", own)
            if store.check([f"thanks/{own}/{rank}"]):
                waiting.discard(rank)
        time.sleep(0.01)
    return own


def open_store(place: Place) -> "dist.Store":  # type: ignore[name-defined]
    """Where the ranks meet: torchrun's own store, or one that rank 0 opens."""
    if place.num_ranks == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if dist.is_torchelastic_launched():
        return next(dist.rendezvous("env://", place.rank, place.num_ranks))[0]  # type: ignore[attr-defined]
    host, port = meeting_point(place)
    return dist.TCPStore(host, port, place.num_ranks, is_master=place.rank == 0)  # type: ignore[attr-defined]
