"""Commands and studies of other installed packages, such as megabatch_lab."""

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec


def find_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, without those whose package no longer exists."""
    return {entry.name: entry for entry in entry_points(group=group) if find_spec(entry.value.partition(".")[0])}
