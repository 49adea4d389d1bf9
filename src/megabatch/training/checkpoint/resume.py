"""Choose how a run starts: in a new folder, or at a checkpoint of an earlier run.

auto    resume an unfinished run of the same recipe, in `run.dir` or in the newest runs/<recipe>-<nnn>, if any
never   start a new run
PATH    resume the run, or from the checkpoint, at PATH
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from msgspec import Struct

from megabatch.config.loading import load_config, silent
from megabatch.config.messages import show_value
from megabatch.config.resolve import decisive_settings
from megabatch.config.schema import RunConfig
from megabatch.data.pipeline.images import PixelStatistics
from megabatch.errors import UserError
from megabatch.io.disk import WRITING
from megabatch.io.reading import Undecodable, read_regular
from megabatch.io.tensor_header import Entry
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import BUFFER, LARS
from megabatch.optim.muon import Muon
from megabatch.optim.optimizers import DecoupledSGD, parts_of
from megabatch.planning.tuning import MAX_BYTES, Tuning, decode_tuning
from megabatch.ranks.world import World
from megabatch.runs.files import CHECKPOINTS, CONFIG, LOCK, PLAN
from megabatch.runs.folder import next_folder, numbered_runs
from megabatch.runs.reader import is_run, is_running, read_summary, started_in
from megabatch.runs.totals import RunTotals
from megabatch.text import print_line
from megabatch.training.checkpoint.card import pixels_of, read_card
from megabatch.training.checkpoint.format import (
    DESCRIPTION,
    NAMES,
    Checkpoint,
    DamagedCheckpoint,
    Description,
    invalid_entries,
    newest_first,
    read_checkpoint,
    read_tuning,
)
from megabatch.training.checkpoint.save import is_finite
from megabatch.training.checkpoint.state import LOSS_SCALE, NUMBER, OPTIMIZER, named_parameters, split_name
from megabatch.training.checkpoint.state import training_state as state_of
from megabatch.training.parts import Training


class Start(Struct, frozen=True):
    """The folder and the checkpoint from which a run starts."""

    folder: Path  # if `is_new`, another process may take its number first
    checkpoint: Path | None  # None: from the first step
    is_explicit: bool = False  # the user named the checkpoint: no other one is used
    is_new: bool = False


def decide_start(config: RunConfig, resume: str, world: World) -> Start:
    """Choose on rank 0 how the run starts, and broadcast the choice.  All ranks call it."""

    def choose() -> tuple[str, str | None, bool, bool]:
        start = choose_start(config, resume)
        checkpoint = str(start.checkpoint) if start.checkpoint else None
        return str(start.folder), checkpoint, start.is_explicit, start.is_new

    folder, checkpoint, is_explicit, is_new = world.from_rank_0(choose, tuple[str, str | None, bool, bool])
    return Start(Path(folder), Path(checkpoint) if checkpoint else None, is_explicit, is_new)


class Stored(Struct, frozen=True):
    """Choices and measurements of the resumed run; None for a new run."""

    tuning: Tuning | None = None
    pixels: PixelStatistics | None = None


def find_stored(start: Start, world: World) -> Stored:
    """Read the stored choices on rank 0, and broadcast them."""
    return world.from_rank_0(lambda: Stored(stored_tuning(start), stored_pixels(start)), Stored)


def stored_tuning(start: Start) -> Tuning | None:
    """Return how the resumed run all-reduces its gradients, or None if no readable file states it."""
    # The plan in the folder belongs to the latest attempt; a checkpoint that the user named has another.
    paths = [start.folder / PLAN, *(path / DESCRIPTION for path in newest_first(start.folder / CHECKPOINTS))]
    if start.is_explicit and start.checkpoint:
        paths = [start.checkpoint / DESCRIPTION]
    for path in paths:
        try:
            return decode_tuning(read_regular(path, MAX_BYTES)) if path.name == PLAN else read_tuning(path)
        except FileNotFoundError:
            continue
        except (OSError, Undecodable) as error:
            report(f"{path} has no readable plan of the all-reduce ({error})")
    return None


def report(problem: str) -> None:
    print_line(f"megabatch: {problem}; it is skipped", to_stderr=True)


def stored_pixels(start: Start) -> PixelStatistics | None:
    """Return the pixel statistics that the resumed run measured when it started."""
    with contextlib.suppress(UserError, OSError):  # they can be measured again from the same images
        card = read_card(start.folder)
        return pixels_of(card) if card else None
    return None


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run without validating it, since hashing takes time."""
    return next(iter(newest_first(folder / CHECKPOINTS)), None)


def choose_start(config: RunConfig, resume: str) -> Start:
    """Choose how a run starts.  Write nothing."""
    require_access(f"run.dir={config.run.dir}", Path(config.run.dir or "."))
    require_access(f"--resume {resume}", Path(resume))
    if resume == "never":
        return Start(new_folder(config), None, is_new=True)
    if resume != "auto":
        return start_at(Path(resume), config)
    if config.run.dir is None:
        for earlier in reversed(numbered_runs(config.name)):
            if is_run(earlier) and not is_running(earlier) and not resume_problem(earlier, config):
                return Start(earlier, newest_checkpoint(earlier))
        return Start(new_folder(config), None, is_new=True)
    folder = Path(config.run.dir)
    if is_run(folder):
        return resume_run(folder, config)
    return Start(new_folder(config), None, is_new=True)


def require_access(name: str, folder: Path) -> None:
    """Raise UserError if the user has no access to the folder: runs are private."""
    try:
        if folder.is_dir():
            (folder / CONFIG).exists()
            next(folder.iterdir(), None)
    except PermissionError:
        raise UserError(f"{name}: permission denied; ask its owner for access, or give another folder") from None


def start_at(path: Path, config: RunConfig) -> Start:
    if is_run(path):
        return resume_run(path, config)
    if (path / DESCRIPTION).is_file():
        checkpoint = path.resolve()
        raise_if(resume_problem(checkpoint.parents[1], config), checkpoint.parents[1])
        return Start(checkpoint.parents[1], checkpoint, is_explicit=True)
    raise UserError(f"--resume {path} is neither a run's folder nor a checkpoint; `megabatch runs` lists runs")


def resume_run(folder: Path, config: RunConfig) -> Start:
    raise_if(resume_problem(folder, config), folder)
    return Start(folder, newest_checkpoint(folder))


def raise_if(reason: str | None, folder: Path) -> None:
    if reason:
        raise UserError(f"{folder} {reason}; give another run.dir")


def read_start(start: Start, report: Callable[[str], None], training: Training | None = None) -> Checkpoint | None:
    """Read the newest checkpoint that is undamaged and fits the training, or the one that the user named.

    Each file is read once.  The training is not changed.

    Args:
        start: the run, and the checkpoint if the user named one.
        report: called with the problem of each checkpoint that is skipped.
        training: checks that the checkpoint fits; None skips these checks.

    Returns:
        The checkpoint, or None if the run ended before its first one.
    """
    for path in [] if start.is_explicit else invalid_entries(start.folder / CHECKPOINTS):
        report(f"{path} is not a checkpoint of this run")
    if start.checkpoint is None:
        return None
    checks = (partial(layout_problem, training), partial(value_problem, training)) if training else (None, None)
    for path in [start.checkpoint] if start.is_explicit else newest_first(start.folder / CHECKPOINTS):
        try:
            return read_checkpoint(path, *checks)
        except DamagedCheckpoint as damage:
            if start.is_explicit:
                raise UserError(f"{damage}; give another checkpoint") from damage
            report(str(damage))
    raise UserError(f"{start.folder}: all checkpoints are damaged; train again in another run.dir, or delete this one")


def layout_problem(training: Training, description: Description, found: Mapping[str, Entry]) -> str | None:
    totals = description.totals
    return next(chain(totals_problems(totals, training), layout_problems(found, training, totals)), None)


def value_problem(training: Training, description: Description, state: Mapping[str, torch.Tensor]) -> str | None:
    return next(value_problems(state, training, description.totals), None)


def resume_problem(folder: Path, config: RunConfig) -> str | None:
    """Return why the run in `folder` cannot be resumed with this recipe, or None if it can."""
    summary = read_summary(folder)
    is_finished = summary is not None and summary.status == "finished"
    return recipe_difference(folder, config) or ("holds this run, and it is finished" if is_finished else None)


def recipe_difference(folder: Path, config: RunConfig) -> str | None:
    """Return the first difference between the run in `folder` and this recipe, or None if they are the same."""
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
    """Return True if both sources are the same folder; the earlier one may be relative to another directory."""
    before = started_in(folder) / earlier.data.source
    return before.exists() and os.path.realpath(config.data.source) == os.path.realpath(before)


def new_folder(config: RunConfig) -> Path:
    """Return the folder that the recipe names, or the next free runs/<recipe>-<nnn>."""
    if config.run.dir is None:
        return next_folder(config.name)
    folder = Path(config.run.dir)
    if folder.exists() and not is_empty(folder):
        raise UserError(f"run.dir={config.run.dir!r} exists and is not an empty folder; give a new one, or omit it")
    return folder


def is_empty(folder: Path) -> bool:
    """Return True for an empty folder.  Files of a run that was killed before it wrote its recipe do not count."""
    return folder.is_dir() and all(path.name == LOCK or path.name.startswith(WRITING) for path in folder.iterdir())


# Checks of a checkpoint's tensors against the training, before any of them is loaded.
#
# The layout of the model's tensors and of the loss scale is known exactly.  Optimizers create their state in the first
# step, so it is checked by the conventions of torch's optimizers.  The state of a user-defined optimizer may have any
# layout, but must belong to existing parameters.  A checksum does not replace these checks: it comes with the file.

# State of torch's optimizers that has the shape and the dtype of its parameter.
ELEMENTWISE = {
    BUFFER,
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "ax", "sum", "prev"),
}
STEP = "step"  # the counter of torch's optimizers
NUMBERS = {("I64", ()), ("F64", ()), ("BOOL", ()), ("F32", (0,))}  # results of `number_to_tensor`

Tensors = Mapping[str, Entry]
Problems = Iterator[str]


def layout_problems(found: Tensors, training: Training, totals: RunTotals) -> Problems:
    """Yield the problems with the names, dtypes and shapes in a file's header."""
    expected = state_of(training)
    fixed = {name: tensor for name, tensor in expected.items() if not name.startswith((OPTIMIZER, NUMBER))}
    yield from differences(found, fixed)
    parameters = dict(named_parameters(training.optimizer))
    of_optimizer = [name for name in found if name not in fixed]
    for name in of_optimizer:
        yield from optimizer_problems(name, found, parameters, training.optimizer)
    yield from missing_state(of_optimizer, expected, training, totals)


def differences(found: Tensors, expected: Mapping[str, torch.Tensor]) -> Problems:
    """Yield the expected tensors that are missing or have another dtype or shape."""
    for name, tensor in expected.items():
        wanted = f"{NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
        if name not in found:
            yield f"{name} ({wanted}) is missing"
        elif str(found[name]) != wanted:
            yield f"{name} is {found[name]}, expected {wanted}"


def optimizer_problems(
    name: str, found: Tensors, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> Problems:
    parameter_name, key = split_name(name)
    parameter, entry = parameters.get(parameter_name), found[name]
    if not name.startswith((OPTIMIZER, NUMBER)) or parameter is None or not key:
        yield f"{name} ({entry}) does not belong to this model or optimizer"
    elif name.startswith(NUMBER):
        if (entry.dtype, tuple(entry.shape)) not in NUMBERS:
            yield f"{name} is {entry}, expected a number"
        if f"{OPTIMIZER}{parameter_name}.{key}" in found:
            yield f"{name} is stored both as a number and as a tensor"
    elif is_conventional(optimizer) and key in ELEMENTWISE:
        yield from differences(found, {name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")})
    elif is_conventional(optimizer) and key == STEP and entry.shape:
        yield f"{name} is {entry}, expected a number"


def is_conventional(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for optimizers of torch and ours, whose keys are known.  Subclasses may change their meaning."""
    return all(
        type(part) in (LARS, LAMB, Muon, DecoupledSGD) or type(part).__module__.startswith("torch.optim.")
        for part in parts_of(optimizer)
    )


def missing_state(
    of_optimizer: list[str], expected: Mapping[str, object], training: Training, totals: RunTotals
) -> Problems:
    """Yield missing state: a key of one parameter must exist for all, and momentum must exist after an update."""
    optimizer = training.optimizer
    if not is_conventional(optimizer):
        return
    has_updated, found = totals.steps > totals.skipped_steps, set(of_optimizer)
    pairs = [split_name(name) for name in (*of_optimizer, *expected)]
    for part in parts_of(optimizer):
        names = [name for name, _ in named_parameters(part)]
        keys = {key for name, key in pairs if key in ELEMENTWISE and name in set(names)}
        if has_updated and part.defaults.get("momentum") and isinstance(part, LARS):
            keys.add(BUFFER)
        for key in sorted(keys):
            for name in names:
                if not found & {f"{OPTIMIZER}{name}.{key}", f"{NUMBER}{name}.{key}"}:
                    yield f"{OPTIMIZER}{name}.{key} is missing"


def value_problems(state: Mapping[str, torch.Tensor], training: Training, totals: RunTotals) -> Problems:
    """Yield the problems with the values of tensors whose layout is correct.  Saved tensors have no inf or NaN."""
    problem = training.loss_scale.problem_with(state[LOSS_SCALE], totals.steps)
    if problem:
        yield f"{LOSS_SCALE} {problem}"
    counts_steps = is_conventional(training.optimizer)
    for name, tensor in state.items():
        if name.startswith(NUMBER):  # any value is allowed
            continue
        yield from bad_values(name, tensor)
        if counts_steps and name.startswith(OPTIMIZER) and split_name(name)[1] == STEP:
            count = tensor.item()
            if not 0 <= count <= totals.steps or count != int(count):
                yield f"{name} is {count:g}, expected a count up to {totals.steps}"


def bad_values(name: str, tensor: torch.Tensor) -> Problems:
    if not is_finite(tensor):
        yield f"{name} has inf or NaN"
    if tensor.dtype is torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        yield f"{name} has a boolean that is neither 0 nor 1"


def totals_problems(totals: RunTotals, training: Training) -> Problems:
    plan = training.plan
    if totals.global_batch != plan.global_batch:
        yield f"its global batch is {totals.global_batch}, expected {plan.global_batch}"
    if totals.steps > plan.num_steps:
        yield f"it is for step {totals.steps:,}, but the run has {plan.num_steps:,} steps"
