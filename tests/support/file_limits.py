"""A full disk, simulated with RLIMIT_FSIZE: the kernel's error is real, and root gets it too."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def limit_file_size(num_bytes: int) -> None:
    """Limit the size of every file that this process writes; -1 removes the limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    limit_file_size(num_bytes)
    try:
        yield
    finally:
        limit_file_size(resource.RLIM_INFINITY)
