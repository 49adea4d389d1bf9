"""The weights that a run starts from, if its recipe names some: rank 0 reads them, and all ranks get the same."""

from pathlib import Path

import msgspec
from msgspec import Struct
from torch import nn

from megabatch.data.normalise import PixelStatistics
from megabatch.errors import UserError
from megabatch.models.weights import match, read_weights, require_finite
from megabatch.ranks.world import World
from megabatch.runs.files import CHECKPOINTS
from megabatch.train.card import pixels_of
from megabatch.train.saved_weights import find_weights


class InitialWeights(Struct, frozen=True):
    """What rank 0 has found, for all ranks."""

    problem: str | None = None
    lines: list[str] = []  # what to say of it
    pixels: PixelStatistics | None = None  # what a run of ours has trained them on: they expect the same


def load_initial_weights(model: nn.Module, source: str, world: World) -> InitialWeights:
    """Loads what fits into the model of every rank.  All ranks call it."""
    found, tensors = InitialWeights(), {}
    if world.rank == 0:
        try:
            path = Path(source)
            report = match(model, read_weights(path))
            require_finite(report.tensors)
            lines = report.lines(str(path) if path.is_dir() else path.name)
            found, tensors = InitialWeights(None, lines, pixels_of_run(path)), report.tensors
        except UserError as error:
            found = InitialWeights(f"model.weights={source!r}: {error}")
    found = msgspec.json.decode(world.broadcast_text(msgspec.json.encode(found).decode()), type=InitialWeights)
    if found.problem:
        raise UserError(found.problem)
    model.load_state_dict(world.broadcast_tensors(tensors), strict=False)
    return found


def pixels_of_run(path: Path) -> PixelStatistics | None:
    """None for weights that no run of ours has left."""
    try:
        checkpoint = path.name if path.parent.name == CHECKPOINTS else None
        return pixels_of(find_weights(path.parents[1] if checkpoint else path, checkpoint).card)
    except (UserError, OSError):
        return None
