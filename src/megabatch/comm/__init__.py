"""All-reduce of gradients.  `attach` adds it to any script that uses DistributedDataParallel."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `attach` on first use, because importing DDP takes a second and most commands do not need it."""
    if name == "attach":
        from megabatch.comm.api import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
