"""Where a run begins: in a new folder, or where an earlier one stopped.

auto    resumes an unfinished run of the same recipe, in `run.dir` or in the newest runs/<recipe>-<nnn>, if any
never   begins a new run
PATH    resumes the run, or from the checkpoint, at PATH
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from msgspec import Struct

from megabatch.config.loading import load_config, silent
from megabatch.config.messages import show_value
from megabatch.config.resolve import decisive_settings
from megabatch.config.schema import RunConfig
from megabatch.data.pipeline.normalise import PixelStatistics
from megabatch.errors import UserError
from megabatch.io.disk import WRITING
from megabatch.io.reading import Undecodable, read_regular
from megabatch.io.tensor_header import Entry
from megabatch.planning.tuning import Tuning
from megabatch.planning.validate import MAX_BYTES, decode_tuning
from megabatch.runs.files import CHECKPOINTS, CONFIG, LOCK, PLAN
from megabatch.runs.folder import next_folder, numbered_runs
from megabatch.runs.reader import is_run, is_running, read_summary, started_in
from megabatch.text import print_line
from megabatch.training.checkpoint.card import pixels_of, read_card
from megabatch.training.checkpoint.expected import layout_problems, totals_problems, value_problems
from megabatch.training.checkpoint.format import (
    DESCRIPTION,
    Checkpoint,
    DamagedCheckpoint,
    Description,
    newest_first,
    read_checkpoint,
    read_tuning,
    strays,
)
from megabatch.training.parts import Training

Newest = Callable[[Path], Path | None]


class Start(Struct, frozen=True):
    folder: Path
    checkpoint: Path | None  # None: from the first step
    is_given: bool = False  # the checkpoint: no other one will do


def is_numbered(config: RunConfig, resume: str) -> bool:
    """True if the run's folder is chosen by its number; one that is given has a lock of its own."""
    return config.run.dir is None and resume in ("auto", "never")


def stored_tuning(config: RunConfig, resume: str) -> Tuning | None:
    """How the run that would be resumed all-reduces its gradients; None if there is none, or if it does not say."""
    try:
        start = choose_start(config, resume, newest=newest_of)
    except UserError:  # `begin` will say what is wrong with the run
        return None
    # The folder's is that of the latest attempt; a checkpoint that is asked for has its own.
    from_checkpoints = [path / DESCRIPTION for path in newest_first(start.folder / CHECKPOINTS)]
    is_folder = resume == "auto" or is_run(Path(resume))
    paths = [start.folder / PLAN, *from_checkpoints] if is_folder else []
    if start.checkpoint and not is_folder:
        paths = [start.checkpoint / DESCRIPTION]
    for path in paths:
        try:
            return decode_tuning(read_regular(path, MAX_BYTES)) if path.name == PLAN else read_tuning(path)
        except FileNotFoundError:
            continue
        except (OSError, Undecodable) as error:
            report(f"{path} does not say how gradients are all-reduced ({error})")
    return None


def report(problem: str) -> None:
    print_line(f"megabatch: {problem}; it is passed over", to_stderr=True)


def stored_pixels(config: RunConfig, resume: str) -> PixelStatistics | None:
    """As the run that would be resumed has measured them when it began."""
    with contextlib.suppress(UserError, OSError):  # `begin` will say what is wrong with the run
        card = read_card(choose_start(config, resume, newest=newest_of).folder)
        return pixels_of(card) if card else None
    return None


def has_checkpoint(config: RunConfig, resume: str) -> bool:
    """Whether the run would begin from a checkpoint: its weights are there, and nowhere else."""
    try:
        return choose_start(config, resume, newest=newest_of).checkpoint is not None
    except UserError:  # `begin` will say what is wrong with the run
        return True


def newest_of(folder: Path) -> Path | None:
    """The newest checkpoint, whole or not: hashing takes time, and what is wanted here lies beside it."""
    return next(iter(newest_first(folder / CHECKPOINTS)), None)


def choose_start(config: RunConfig, resume: str, newest: Newest) -> Start:
    """Decides, and writes nothing.  `newest` finds the checkpoint of a run to resume from."""
    require_open(f"run.dir={config.run.dir}", Path(config.run.dir or "."))
    require_open(f"--resume {resume}", Path(resume))
    if resume == "never":
        return Start(new_folder(config), None)
    if resume != "auto":
        return start_at(Path(resume), config, newest)
    if config.run.dir is None:
        for earlier in reversed(numbered_runs(config.name)):
            if is_run(earlier) and not is_running(earlier) and not why_not(earlier, config):
                return Start(earlier, newest(earlier))
        return Start(new_folder(config), None)
    folder = Path(config.run.dir)
    if is_run(folder):
        return resume_run(folder, config, newest)
    return Start(new_folder(config), None)


def require_open(name: str, folder: Path) -> None:
    """Runs are their user's alone."""
    try:
        if folder.is_dir():
            (folder / CONFIG).exists()
            next(folder.iterdir(), None)
    except PermissionError:
        raise UserError(f"{name} is closed to this user; ask its owner to open it, or give another") from None


def start_at(path: Path, config: RunConfig, newest: Newest) -> Start:
    if is_run(path):
        return resume_run(path, config, newest)
    if (path / DESCRIPTION).is_file():
        checkpoint = path.resolve()
        refuse_if(why_not(checkpoint.parents[1], config), checkpoint.parents[1])
        return Start(checkpoint.parents[1], checkpoint, is_given=True)
    raise UserError(f"--resume {path} is neither a run's folder nor a checkpoint; `megabatch runs` lists runs")


def resume_run(folder: Path, config: RunConfig, newest: Newest) -> Start:
    refuse_if(why_not(folder, config), folder)
    return Start(folder, newest(folder))


def refuse_if(reason: str | None, folder: Path) -> None:
    if reason:
        raise UserError(f"{folder} {reason}; give another run.dir")


def read_start(start: Start, report: Callable[[str], None], training: Training | None = None) -> Checkpoint | None:
    """The newest that is whole and fits the training, or the one that is given; each file is read once.

    None if the run was ended before its first; `report` hears of damaged ones that were passed over.  Nothing of the
    training is changed.
    """
    for path in [] if start.is_given else strays(start.folder / CHECKPOINTS):
        report(f"{path} is no checkpoint of this run")
    if start.checkpoint is None:
        return None
    checks = (partial(layout_problem, training), partial(value_problem, training)) if training else (None, None)
    for path in [start.checkpoint] if start.is_given else newest_first(start.folder / CHECKPOINTS):
        try:
            return read_checkpoint(path, *checks)
        except DamagedCheckpoint as damage:
            if start.is_given:
                raise UserError(f"{damage}; give another") from damage
            report(str(damage))
    raise UserError(f"{start.folder} has no checkpoint that is whole; train again in another run.dir, or remove it")


def layout_problem(training: Training, description: Description, found: Mapping[str, Entry]) -> str | None:
    totals = description.totals
    return next(chain(totals_problems(totals, training), layout_problems(found, training, totals)), None)


def value_problem(training: Training, description: Description, state: Mapping[str, torch.Tensor]) -> str | None:
    return next(value_problems(state, training, description.totals), None)


def why_not(folder: Path, config: RunConfig) -> str | None:
    """Why the run in `folder` cannot be resumed under this recipe; None if it can."""
    summary = read_summary(folder)
    is_finished = summary is not None and summary.status == "finished"
    return why_other(folder, config) or ("holds this run, and it is finished" if is_finished else None)


def why_other(folder: Path, config: RunConfig) -> str | None:
    """In what the run in `folder` is another one than this recipe's; None if it is the same."""
    try:
        earlier = load_config(str(folder / CONFIG), report=silent)
    except UserError as error:
        return f"holds a run whose recipe cannot be read ({error})"
    ours, theirs = decisive_settings(config), decisive_settings(earlier)
    for key in sorted(ours | theirs):
        if ours.get(key) != theirs.get(key) and not (key == "data.source" and is_same_folder(config, earlier, folder)):
            return f"holds a run with {key}={show_value(theirs.get(key))}, not {show_value(ours.get(key))}"
    return None


def is_same_folder(config: RunConfig, earlier: RunConfig, folder: Path) -> bool:
    """Whether the images lie in the same place, under a path that is relative to another folder."""
    before = started_in(folder) / earlier.data.source
    return before.exists() and os.path.realpath(config.data.source) == os.path.realpath(before)


def new_folder(config: RunConfig) -> Path:
    """The folder that the recipe names, or the next free runs/<recipe>-<nnn>."""
    if config.run.dir is None:
        return next_folder(config.name)
    folder = Path(config.run.dir)
    if folder.exists() and not is_empty(folder):
        raise UserError(
            f"run.dir={config.run.dir!r} exists and is not an empty folder; give a new one, or leave it out"
        )
    return folder


def is_empty(folder: Path) -> bool:
    """But for what a run that was killed in its first moment has left."""
    return folder.is_dir() and all(path.name == LOCK or path.name.startswith(WRITING) for path in folder.iterdir())
