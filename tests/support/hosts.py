"""Ranks of one machine that take each other for ranks of several hosts."""

from collections.abc import Iterator
from contextlib import contextmanager

from megabatch.comm import groups
from megabatch.ranks.world import World


@contextmanager
def on_hosts(world: World, hosts: str) -> Iterator[None]:
    """The host of each rank is a letter, in the order of ranks."""
    kept, groups.host_identity = groups.host_identity, lambda: hosts[world.rank]
    try:
        yield
    finally:
        groups.host_identity = kept
