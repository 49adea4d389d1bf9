"""The bytes of encoded images, and of the small files beside them: none that is larger than it may be."""

import errno
import os
from pathlib import Path

from megabatch.regular_files import FLAGS, require_regular

MEGABYTE = 1_000_000
MAX_FILE_MB = 256  # as much as 85 megapixels take that are not compressed
MOST_BYTES = MAX_FILE_MB * MEGABYTE


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """In half the time of Path.read_bytes, which asks for more than it needs to know."""
    descriptor = os.open(path, FLAGS)
    try:
        status = os.fstat(descriptor)
        require_regular(status.st_mode, path)
        require_modest(status.st_size, most_bytes)
        content = os.read(descriptor, status.st_size)
        while len(content) < status.st_size and (more := os.read(descriptor, status.st_size - len(content))):
            content += more
        return content
    finally:
        os.close(descriptor)


def require_modest(size: int, most_bytes: int) -> None:
    """An OSError, which whoever reads files expects anyway."""
    if size > most_bytes:
        limit = f"data.max_file_mb={most_bytes // MEGABYTE}"
        raise OSError(errno.EFBIG, f"its {size:,} bytes are more than {limit}")
