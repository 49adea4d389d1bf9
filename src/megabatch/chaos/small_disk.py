"""A small disk (tmpfs), to be filled.  It is mounted in a namespace of its own, and goes with the processes in it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FILLING = "filling"
BLOCK = bytes(1 << 16)
# Holds the namespace until its input is closed, also by the end of whoever has opened it.
HOLD = 'mount -t tmpfs -o size="$1" chaos "$2" && echo mounted && exec cat'


class SmallDisk(NamedTuple):
    path: Path  # for commands that are run on it
    seen: Path  # the same, for us
    prefix: list[str]  # of commands that are run on it

    def fill(self) -> None:
        """To the last byte."""
        with (self.seen / FILLING).open("ab", buffering=0) as file:
            size = len(BLOCK)
            while size:
                try:
                    file.write(BLOCK[:size])
                except OSError:
                    size //= 2

    def free(self) -> None:
        (self.seen / FILLING).unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Raises OSError where there can be none."""
    path.mkdir(parents=True)
    as_root = os.geteuid() == 0
    unshare = ["unshare", "--mount", *([] if as_root else ["--user", "--map-root-user"])]
    with subprocess.Popen(
        [*unshare, "sh", "-c", HOLD, "sh", str(num_bytes), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as holder:
        assert holder.stdout
        if holder.stdout.readline() != b"mounted\n":
            raise OSError("no mounts in a namespace of one's own")
        enter = ["nsenter", f"--target={holder.pid}", "--mount", f"--wd={Path.cwd()}"]
        enter += [] if as_root else ["--user", "--preserve-credentials"]
        yield SmallDisk(path, Path(f"/proc/{holder.pid}/root{path}"), enter)


def why_no_disk(folder: Path) -> str | None:
    """Tries it."""
    missing = [tool for tool in ("mount", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        return f"no {missing[0]}"
    try:
        with small_disk(folder, 1 << 20) as disk:
            disk.fill()
    except OSError as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None
