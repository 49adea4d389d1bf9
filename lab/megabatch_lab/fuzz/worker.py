"""A process that reads inputs one after another and reports each outcome: python -m megabatch_lab.fuzz.worker.

The worker enforces the memory limit, and its parent the time limit: an input that crashes or stalls the worker is the
one after the last reported outcome.
"""

import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

from megabatch.data.pipeline.decode import Unreadable
from megabatch.errors import UserError
from megabatch.io.disk import remove
from megabatch.ranks.signals import die_with
from megabatch.text import LONGEST_SHOWN, one_line
from megabatch_lab.fuzz.catalog import FORMATS
from megabatch_lab.fuzz.formats import Bench, make_input, write_input
from megabatch_lab.fuzz.outcome import InputOutcome

REFUSALS = (UserError, Unreadable)
MEGABYTE = 1 << 20
READY = b"ready"  # sent before the first outcome: the time limit starts here
HARD_LIMIT_FACTOR = 4  # times the memory limit: larger allocations fail
SHOWN_FRAMES = 3
PACKAGE = "megabatch"


class FuzzJob(Struct, frozen=True, kw_only=True):
    seed: int
    inputs: list[tuple[str, int]]  # by format and number
    most_mb: int  # memory limit per input
    folder: str  # private to this process
    results: int  # descriptor for the outcomes
    parent: int  # this process ends with it


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=FuzzJob)
    die_with(job.parent)
    os.chdir(job.folder)
    with os.fdopen(job.results, "wb", buffering=0) as results:
        for outcome in work(job, on_ready=lambda: results.write(READY + b"\n")):
            results.write(msgspec.json.encode(outcome) + b"\n")


def work(job: FuzzJob, on_ready: Callable[[], object] = lambda: None) -> Iterator[InputOutcome]:
    benches, folder = Path(job.folder, "benches"), Path(job.folder, "input")
    benches.mkdir()
    with ExitStack() as stack:
        set_up = {name: FORMATS[name].set_up(benches, stack) for name in {name for name, _ in job.inputs}}
        before_mb = peak_mb()
        limit_memory(HARD_LIMIT_FACTOR * job.most_mb)
        on_ready()
        for name, number in job.inputs:
            outcome = judge(name, number, set_up[name], job.seed, folder)
            taken_mb = peak_mb() - before_mb
            if taken_mb > job.most_mb:
                detail = f"used {taken_mb:,.0f} MB of memory"
                outcome = msgspec.structs.replace(outcome, kind="escaped", detail=detail)
                before_mb = peak_mb()
            yield outcome


def judge(name: str, number: int, bench: Bench, seed: int, folder: Path) -> InputOutcome:
    """Read one input with the reader of its format and judge the result."""
    remove(folder)
    folder.mkdir()
    files, is_valid = make_input(name, FORMATS[name], bench.specimens, seed, number)
    write_input(files, folder)
    past_header = is_valid or FORMATS[name].has_header(files)
    outcome = InputOutcome(format=name, number=number, kind="ok", past_header=past_header)
    try:
        bench.read(folder)
    except REFUSALS as error:
        problem = refusal_problem(error, is_valid)
        kind = "escaped" if problem else "one line"
        return msgspec.structs.replace(outcome, kind=kind, detail=problem or one_line(str(error)))
    except Exception as error:
        detail = one_line(f"{type(error).__name__}: {error}", 300)
        return msgspec.structs.replace(outcome, kind="escaped", detail=detail, where=innermost(error))
    return outcome


def refusal_problem(refusal: Exception, is_valid: bool) -> str | None:
    """Return the problem with a refusal, or None."""
    text = str(refusal)
    if is_valid:
        return f"a valid input was refused: {one_line(text)}"
    if not text or not text.isprintable() or len(text) > LONGEST_SHOWN:
        return f"the error is not one line: {one_line(text)!r}"
    if any(isinstance(cause, MemoryError) for cause in causes(refusal)):
        return "tried to allocate more memory than available"
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, each once: an error that was raised again may be its own cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def innermost(error: Exception) -> str:
    """Return our innermost frames and the frame that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if f"{os.sep}{PACKAGE}{os.sep}" in frame.filename and "fuzz" not in frame.filename
    ]
    shown = [*ours[-SHOWN_FRAMES:], *(frames[-1:] if frames[-1] not in ours else [])]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in shown)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def limit_memory(more_mb: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + more_mb * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
