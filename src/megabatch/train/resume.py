"""Where a run begins: in a new folder, or where an earlier one stopped.

auto    goes on with an unfinished run of the same recipe, in `run.dir` or in the newest runs/<recipe>-<nnn>, if any
never   begins anew
PATH    goes on with the run, or from the checkpoint, at PATH
"""

import contextlib
import fcntl
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from megabatch.config.loading import load_config
from megabatch.config.messages import show_value
from megabatch.config.schema import RunConfig
from megabatch.errors import UserError
from megabatch.planning.tuning import Tuning
from megabatch.runs.folder import LOCK, PLAN, is_held
from megabatch.runs.records import Summary
from megabatch.train.checkpoint import DESCRIPTION, Description, newest_good

RUNS = Path("runs")
# What does not change what is computed: sections, and settings.
IRRELEVANT = ("name", "about", "marks", "run", "checkpoint", "comm.timeout_s", "comm.timeline")
Newest = Callable[[Path], Path | None]


class Start(Struct, frozen=True):
    folder: Path
    checkpoint: Path | None  # None: from the first step


@contextmanager
def alone_in_runs(config: RunConfig, resume: str) -> Iterator[None]:
    """Of runs that start at the same moment, one after the other chooses its number and takes its folder."""
    if config.run.dir is not None or resume not in ("auto", "never"):
        yield  # the folder is given, and its own lock decides
        return
    RUNS.mkdir(exist_ok=True)
    with (RUNS / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stored_tuning(config: RunConfig, resume: str) -> Tuning | None:
    """How the run that would go on sums its gradients; None if there is none, or if it cannot be told."""
    try:
        start = choose_start(config, resume, newest=newest_of)
    except UserError:  # `begin` will say what is wrong with the run
        return None
    # The folder's is that of the latest attempt; a checkpoint that is asked for has its own.
    from_checkpoints = sorted((start.folder / "checkpoints").glob(f"step-*/{DESCRIPTION}"), reverse=True)
    is_folder = resume == "auto" or is_run(Path(resume))
    paths = [start.folder / PLAN, *from_checkpoints] if is_folder else []
    if start.checkpoint and not is_folder:
        paths = [start.checkpoint / DESCRIPTION]
    for path in paths:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            content = path.read_bytes()
            if path.name == PLAN:
                return msgspec.json.decode(content, type=Tuning)
            return msgspec.json.decode(content, type=Description).tuning
    return None


def newest_of(folder: Path) -> Path | None:
    """The newest checkpoint, whole or not: hashing takes time, and what is wanted here lies beside it."""
    return max((folder / "checkpoints").glob("step-*"), default=None)


def choose_start(config: RunConfig, resume: str, newest: Newest) -> Start:
    """Decides, and writes nothing.  `newest` finds the checkpoint of a run to go on from."""
    if resume == "never":
        return Start(new_folder(config), None)
    if resume != "auto":
        return start_at(Path(resume), config, newest)
    if config.run.dir is None:
        for earlier in reversed(numbered(config.name)):
            if is_run(earlier) and not is_held(earlier) and not why_not(earlier, config):
                return Start(earlier, newest(earlier))
        return Start(new_folder(config), None)
    folder = Path(config.run.dir)
    if is_run(folder):
        return go_on(folder, config, newest)
    return Start(new_folder(config), None)


def start_at(path: Path, config: RunConfig, newest: Newest) -> Start:
    if is_run(path):
        return go_on(path, config, newest)
    if (path / DESCRIPTION).is_file():
        checkpoint = path.resolve()
        refuse_if(why_not(checkpoint.parents[1], config), checkpoint.parents[1])
        return Start(checkpoint.parents[1], checkpoint)
    raise UserError(f"--resume {path} is neither a run's folder nor a checkpoint; `megabatch runs` lists runs")


def go_on(folder: Path, config: RunConfig, newest: Newest) -> Start:
    refuse_if(why_not(folder, config), folder)
    return Start(folder, newest(folder))


def refuse_if(reason: str | None, folder: Path) -> None:
    if reason:
        raise UserError(f"{folder} {reason}; give another run.dir")


def newest_whole(folder: Path, report: Callable[[str], None]) -> Path | None:
    """None if the run was ended before its first; `report` hears of damaged ones that were passed over."""
    good = newest_good(folder, report)
    if good is None and any((folder / "checkpoints").glob("step-*")):
        raise UserError(f"{folder} has no checkpoint that is whole; begin anew in another run.dir, or remove it")
    return good


def why_not(folder: Path, config: RunConfig) -> str | None:
    """Why the run in `folder` cannot go on under this recipe; None if it can."""
    summary = read_summary(folder)
    is_finished = summary is not None and summary.status == "finished"
    return why_other(folder, config) or ("holds this run, and it is finished" if is_finished else None)


def why_other(folder: Path, config: RunConfig) -> str | None:
    """In what the run in `folder` is another one than this recipe's; None if it is the same."""
    try:
        earlier = load_config(str(folder / "config.toml"))
    except UserError as error:
        return f"holds a run whose recipe cannot be read ({error})"
    ours, theirs = flat(config), flat(earlier)
    for key in sorted(ours | theirs):
        if ours.get(key) != theirs.get(key):
            return f"holds a run with {key}={show_value(theirs.get(key))}, not {show_value(ours.get(key))}"
    return None


def flat(config: RunConfig) -> dict[str, Any]:
    """The settings that determine a run, by their dotted names."""
    flattened: dict[str, Any] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, member in value.items():
                add(member, f"{name}.{key}" if name else key)
        else:
            flattened[name] = value

    add(msgspec.to_builtins(config), "")
    return {key: value for key, value in flattened.items() if not {key, key.partition(".")[0]} & set(IRRELEVANT)}


def read_summary(folder: Path) -> Summary | None:
    """None for a run that runs, or that was killed."""
    try:
        return msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    except (OSError, msgspec.MsgspecError):
        return None


def is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def new_folder(config: RunConfig) -> Path:
    """The folder that the recipe names, or the next free runs/<recipe>-<nnn>."""
    if config.run.dir is None:
        earlier = numbered(config.name)
        return RUNS / f"{config.name}-{number_of(earlier[-1]) + 1 if earlier else 1:03d}"
    folder = Path(config.run.dir)
    if folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir())):
        raise UserError(
            f"run.dir={config.run.dir!r} exists and is not an empty folder; give a new one, or leave it out"
        )
    return folder


def numbered(name: str) -> list[Path]:
    """The folders runs/<name>-<nnn>, in the order of their numbers."""
    return sorted(
        (path for path in RUNS.glob(f"{name}-*") if re.fullmatch(r"\d{3,}", path.name[len(name) + 1 :])), key=number_of
    )


def number_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
