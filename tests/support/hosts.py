"""Ranks of one machine that appear to be on several hosts."""

from collections.abc import Iterator
from contextlib import contextmanager

from megabatch.comm import groups
from megabatch.ranks.world import World


@contextmanager
def on_hosts(world: World, hosts: str) -> Iterator[None]:
    """Give each rank a host: character r of `hosts` is the host of rank r."""
    original, groups.host_identity = groups.host_identity, lambda: hosts[world.rank]
    try:
        yield
    finally:
        groups.host_identity = original
