"""What ranks tell each other outside of collectives, through the store at which they met.

A rank that fails takes the others with it: they see a broken connection.  The first one to fail says so here, before it
leaves, and alone speaks to the user.  The run's folder is told here too, to the one that logs and to restarted ranks.
"""

import os
from pathlib import Path

import torch.distributed as dist

from megabatch.comm.discover import Place, meeting_point


class Notices:
    def __init__(self, place: Place) -> None:
        self.lasting = open_store(place)  # torchrun's outlives its ranks
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # Restarted ranks must not find the addresses of those before.
        self.store = dist.PrefixStore(f"attempt-{self.attempt}", self.lasting)  # type: ignore[attr-defined]
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

    def tell_folder(self, folder: Path) -> None:
        self.tell("folder", str(folder))

    def folder(self) -> Path | None:
        """The run's folder, where it is known and this host sees it."""
        told = self.told("folder")
        return Path(told) if told and Path(told).is_dir() else None


def open_store(place: Place) -> "dist.Store":  # type: ignore[name-defined]
    """Where the ranks meet: torchrun's own store, or one that rank 0 opens."""
    if place.num_ranks == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if dist.is_torchelastic_launched():
        return next(dist.rendezvous("env://", place.rank, place.num_ranks))[0]  # type: ignore[attr-defined]
    host, port = meeting_point(place)
    return dist.TCPStore(host, port, place.num_ranks, is_master=place.rank == 0)  # type: ignore[attr-defined]
