"""The weights that a run starts from, if its recipe names some: rank 0 reads them, and all ranks get the same."""

from pathlib import Path

import msgspec
from msgspec import Struct
from torch import nn

from megabatch.errors import UserError
from megabatch.models.weights import match, read_weights
from megabatch.ranks.world import World


class Found(Struct, frozen=True):
    """What rank 0 has found, for the others."""

    problem: str | None
    lines: list[str]


def load_initial_weights(model: nn.Module, source: str, world: World) -> tuple[str, ...]:
    """Loads what fits into the model of every rank, and returns what to say of it.  All ranks call it."""
    found, tensors = Found(None, []), {}
    if world.rank == 0:
        try:
            path = Path(source)
            report = match(model, read_weights(path))
            found, tensors = Found(None, report.lines(str(path) if path.is_dir() else path.name)), report.tensors
        except UserError as error:
            found = Found(f"model.weights={source!r}: {error}", [])
    found = msgspec.json.decode(world.broadcast_text(msgspec.json.encode(found).decode()), type=Found)
    if found.problem:
        raise UserError(found.problem)
    model.load_state_dict(world.broadcast_tensors(tensors), strict=False)
    return tuple(found.lines)
