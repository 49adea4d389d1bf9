"""The all-reduce of gradients.  `attach` gives our all-reduce to any script that uses DistributedDataParallel."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`attach` is imported when it is asked for: DDP takes a second to import, and most commands do without."""
    if name == "attach":
        from megabatch.comm.api import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
