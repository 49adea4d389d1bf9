"""A command that starts ranks, and that is started again if it ends too early, as by a batch system."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from megabatch.ranks.signals import die_with
from megabatch_lab.chaos.judge import Traces
from megabatch_lab.chaos.processes import MARK, end_marked, marked, ranks_of

TRAIN = [sys.executable, "-P", "-m", "megabatch", "train"]
MESSAGES = ("megabatch: ", "stopping ")  # prefixes of lines that report a fault
WARNING = "warning "  # of a full disk; a recipe may print others
# Variables of the caller that would make ranks join another run.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MEGABATCH_LAUNCHER", "MEGABATCH_STORE")


class Launcher:
    """`megabatch train` on this machine, or torchrun on one host."""

    def __init__(
        self, name: str, command: Sequence[str], mark: str, folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.command, self.mark, self.folder = name, list(command), mark, folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.traces = Traces(mark, self.temporary)
        ours = {
            MARK: mark,
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),  # otherwise torch creates one in TMPDIR and leaves it
            "PYTHONUNBUFFERED": "1",  # a kill loses no printed line
        }
        self.environment = {key: value for key, value in os.environ.items() if key not in FOREIGN}
        self.environment |= ours | dict(settings or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def start(self) -> None:
        with (self.folder / "out.log").open("ab") as out, (self.folder / "err.log").open("ab") as err:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.environment,
                start_new_session=True,
                preexec_fn=partial(begin_child, os.getpid()),
            )
        self.num_starts += 1

    @property
    def process_id(self) -> int:
        assert self.process
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, or None while the launcher runs."""
        assert self.process
        return self.process.poll()

    def processes(self) -> list[int]:
        return marked(self.mark)

    def ranks(self) -> dict[int, int]:
        return ranks_of(self.mark)

    def log_bytes(self) -> tuple[int, int]:
        return tuple((self.folder / name).stat().st_size for name in ("out.log", "err.log"))  # type: ignore[return-value]

    def messages(self, since: tuple[int, int], prefixes: tuple[str, ...] = MESSAGES) -> list[str]:
        """Return the messages about faults in the logs, starting at these byte offsets."""
        lines = []
        for name, begin in zip(("out.log", "err.log"), since, strict=True):
            text = (self.folder / name).read_bytes()[begin:].decode(errors="replace")
            lines += [line for line in text.splitlines() if line.startswith(prefixes)]
        return lines

    def end(self) -> None:
        """End all remaining processes."""
        end_marked(self.mark)
        if self.process:
            self.process.wait()


def begin_child(parent: int) -> None:
    """Run in the new process: restore SIGINT, which background jobs of a shell ignore, and die with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(parent)
