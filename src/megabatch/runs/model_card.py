"""The model card: metadata that belongs to weights, such as their input format, class names and training settings.

It is in every checkpoint (state.json), in the metadata of model.safetensors, and in the run's folder (model.json).  It
depends only on model, data and numerics, so equal runs have equal bytes.  Floats survive a round trip bitwise.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from megabatch.errors import UserError
from megabatch.io.reading import Undecodable, decode_json
from megabatch.runs.records import Count, Share
from megabatch.text import is_plain

FORMAT = 1
METADATA = "megabatch"  # the key in the metadata of a safetensors file
Mean = Annotated[float, Meta(ge=-1e30, le=1e30)]
Deviation = Annotated[float, Meta(ge=1e-30, le=1e30)]


class ModelCard(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    model: dict[str, Any]  # the [model] section: name and options
    classes: Annotated[list[str], Meta(min_length=1)]  # in the order of the scores
    multi_label: bool = False  # scores are independent: their sigmoids are probabilities, not their softmax
    num_channels: Annotated[int, Meta(ge=1, le=65536)]
    image_size: Annotated[int, Meta(ge=1, le=8192)]  # in training, the largest; the network was built for it
    test_image_size: Annotated[int, Meta(ge=1, le=8192)]  # in evaluation, and of the images to classify
    center_crop: Annotated[float, Meta(gt=0, le=1)]  # of the shorter side
    exif_orientation: bool = False  # images are turned by it
    mean: list[Mean]  # per channel, subtracted from pixels of 0 to 255
    deviation: list[Deviation]  # per channel, the divisor
    precision: str
    recipe: dict[str, Any]  # every setting that affects the results, by dotted name
    steps: Count = 0
    top1: Share | None = None  # of the newest evaluation; None before the first
    top5: Share | None = None
    test_loss: float | None = None
    mean_average_precision: Share | None = None  # of multi-label models
    samples_evaluated: Count = 0

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def decode_card(content: bytes | str, where: str) -> ModelCard:
    try:
        card = decode_json(content, ModelCard)
    except Undecodable as error:
        raise UserError(f"{where} does not describe a model ({error}); train it again") from None
    return require_card(card, where)


def require_card(card: ModelCard, where: str) -> ModelCard:
    """Return the card if it is valid; `where` names its file in messages."""
    if card.format != FORMAT:
        raise UserError(
            f"{where} has format {card.format} of another version of megabatch, this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    problem = card_problem(card)
    if problem:
        raise UserError(f"{where} does not describe a model ({problem}); train it again")
    return card


def card_problem(card: ModelCard) -> str | None:
    """Return the first inconsistency, or None."""
    if not len(card.mean) == len(card.deviation) == card.num_channels:
        return f"it has {len(card.mean)} means and {len(card.deviation)} deviations for {card.num_channels} channels"
    if not all(is_plain(name) for name in card.classes):
        return "the name of a class is not printable"
    return None
