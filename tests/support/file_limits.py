"""A disk that takes no more: RLIMIT_FSIZE gives the kernel's own error, to whoever is root or not."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def limit_file_size(num_bytes: int) -> None:
    """No file of this process grows beyond it; -1 lifts it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    limit_file_size(num_bytes)
    try:
        yield
    finally:
        limit_file_size(resource.RLIM_INFINITY)
