"""What belongs to a model beside its weights: what its images must look like, what its scores mean, how it was trained.

It lies in every checkpoint (state.json), in the metadata of model.safetensors, and as model.json in the run's folder.
It depends on model, data and numerics alone, so two equal runs have equal bytes; floats are read back to the bit.
"""

from typing import Any

import msgspec
from msgspec import Struct

from megabatch.errors import UserError

FORMAT = 1
METADATA = "megabatch"  # the key in the metadata of a safetensors file


class ModelCard(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    model: dict[str, Any]  # the recipe's section: its name and options
    classes: list[str]  # in the order of the scores
    num_channels: int
    image_size: int
    center_crop: float  # of the shorter side
    mean: list[float]  # of pixels from 0 to 255, per channel; they are subtracted,
    deviation: list[float]  # and divided by
    precision: str
    recipe: dict[str, Any]  # every setting that decides the numbers, by its dotted name
    steps: int = 0
    top1: float | None = None  # of the newest evaluation; None before the first
    top5: float | None = None
    test_loss: float | None = None
    samples_evaluated: int = 0

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def decode_card(content: bytes | str, where: str) -> ModelCard:
    try:
        card = msgspec.json.decode(content, type=ModelCard)
    except msgspec.MsgspecError as error:
        raise UserError(f"{where} does not describe a model ({error}); train it again") from None
    if card.format != FORMAT:
        raise UserError(
            f"{where} was written by another version of megabatch (format {card.format}, this one has {FORMAT}); "
            "use that version"
        )
    return card
