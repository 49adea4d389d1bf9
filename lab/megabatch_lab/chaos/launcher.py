"""A command that starts ranks and is started again when it has ended too early, as a batch system would do."""

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
TALK = ("megabatch: ", "stopping ")  # how lines begin that say what happened
WARNING = "warning "  # of a disk; a recipe may have others
# Of whoever started chaos: ranks would take themselves for others.
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
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),  # else torch makes one in TMPDIR, which is meant to stay
            "PYTHONUNBUFFERED": "1",  # a kill loses no line that was said before it
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
        """None while it runs."""
        assert self.process
        return self.process.poll()

    def processes(self) -> list[int]:
        return marked(self.mark)

    def ranks(self) -> dict[int, int]:
        return ranks_of(self.mark)

    def log_bytes(self) -> tuple[int, int]:
        return tuple((self.folder / name).stat().st_size for name in ("out.log", "err.log"))  # type: ignore[return-value]

    def said(self, since: tuple[int, int], talk: tuple[str, ...] = TALK) -> list[str]:
        """What it and its ranks have said of a fault, since the logs had so many bytes."""
        lines = []
        for name, begin in zip(("out.log", "err.log"), since, strict=True):
            text = (self.folder / name).read_bytes()[begin:].decode(errors="replace")
            lines += [line for line in text.splitlines() if line.startswith(talk)]
        return lines

    def end(self) -> None:
        """Whatever is left of it."""
        end_marked(self.mark)
        if self.process:
            self.process.wait()


def begin_child(parent: int) -> None:
    """In the new process: it hears SIGINT, which a shell's background jobs ignore, and dies with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(parent)
