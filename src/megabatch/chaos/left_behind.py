"""What must not be there any more once a command has ended, however it ended."""

import time
from contextlib import suppress
from pathlib import Path

from megabatch.chaos.processes import LOOK_S, PROC, all_processes, environment_of, listening_ports, marked, open_files
from megabatch.disk import WRITING

SHARED_MEMORY = Path("/dev/shm")
LINGER_S = 5.0  # what the kernel gets to end a process that was killed, on a busy machine


class Traces:
    """Of one launcher: compares what is there with what was there before it was first started."""

    def __init__(self, mark: str, temporary: Path, shared_memory: Path = SHARED_MEMORY) -> None:
        self.mark, self.temporary, self.shared_memory = mark, temporary, shared_memory
        self.known = self.files()

    def files(self) -> set[Path]:
        return names_in(self.shared_memory) | names_in(self.temporary)

    def left(self) -> list[str]:
        """A line for each process and file that is left, and each is said once."""
        found = [describe(process) for process in wait_for_end(self.mark)]
        new = self.files() - self.known
        used = in_use({path for path in new if path.parent == self.shared_memory})  # by others on this machine
        left = (new - used) & self.files()  # and not what another process on this machine has removed meanwhile
        self.known |= left
        return found + [f"{path} is left behind" for path in sorted(left)]


def names_in(folder: Path) -> set[Path]:
    with suppress(OSError):
        return set(folder.iterdir())
    return set()


def wait_for_end(mark: str) -> list[int]:
    """The processes that do not end."""
    deadline_s = time.monotonic() + LINGER_S
    while (found := marked(mark)) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
    return found


def describe(process: int) -> str:
    rank = environment_of(process).get("RANK")
    ports = listening_ports(process)
    return (
        f"process {process}{f' (rank {rank})' if rank else ''} is left behind"
        + f", listening on {', '.join(map(str, ports))}" * bool(ports)
    )


def in_use(files: set[Path]) -> set[Path]:
    """Those that a living process has mapped or open."""
    used: set[str] = set()
    for process in all_processes() if files else ():
        used |= set(open_files(process))
        with suppress(OSError):
            used |= {line.split(maxsplit=5)[-1] for line in (PROC / str(process) / "maps").read_text().splitlines()}
    return {path for path in files if str(path) in used}


def unfinished(run: Path) -> list[str]:
    """In the folder of a run that has ended well."""
    return [f"{path} is left behind" for path in sorted(run.rglob(f"{WRITING}*"))]
