"""The model card of a run: made at its start, stored with its weights, and read to resume or use them."""

from pathlib import Path
from typing import Any

import msgspec

from megabatch.config.resolve import decisive_settings
from megabatch.config.schema import RunConfig
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import DataSet, PixelStatistics
from megabatch.io.reading import read_regular
from megabatch.runs.files import MODEL
from megabatch.runs.model_card import ModelCard, decode_card
from megabatch.runs.reader import MAX_JSON_BYTES
from megabatch.runs.totals import RunTotals

# Paths do not affect the result; the content of the files does.
PATHS = ("data.source", "data.also", "model.weights")
NOT_IN_CARD = ("weights", "freeze", "compile", "cuda_graphs")  # settings of how the model was initialised and run


def make_card(config: RunConfig, data: DataSet, pixels: PixelStatistics) -> ModelCard:
    return ModelCard(
        model={key: value for key, value in msgspec.to_builtins(config.model).items() if key not in NOT_IN_CARD}
        | {"channels_last": config.model.wants_channels_last},
        classes=list(data.class_names),
        multi_label=data.label_sets is not None,
        num_channels=data.num_channels,
        image_size=config.data.image_size,
        test_image_size=config.data.test_side,
        center_crop=data.train.center_crop if isinstance(data.train, EncodedImages) else 1.0,  # arrays are not cropped
        exif_orientation=config.data.exif_orientation,
        mean=list(pixels.mean),
        deviation=list(pixels.deviation),
        precision=config.precision.name,
        recipe={key: value for key, value in decisive_settings(config).items() if key not in PATHS},
    )


def with_results(card: ModelCard, totals: RunTotals) -> ModelCard:
    last = totals.evaluation
    results: dict[str, Any] = {"steps": totals.steps}
    if last:
        results |= {
            "top1": last.top1,
            "top5": last.top5,
            "test_loss": last.test_loss,
            "mean_average_precision": last.mean_average_precision,
            "samples_evaluated": last.samples_evaluated,
        }
    return msgspec.structs.replace(card, **results)


def pixels_of(card: ModelCard) -> PixelStatistics:
    return PixelStatistics(tuple(card.mean), tuple(card.deviation))


def read_card(folder: Path) -> ModelCard | None:
    """Return the card that a run wrote at its start, or None if it was killed before."""
    path = folder / MODEL
    return decode_card(read_regular(path, MAX_JSON_BYTES), str(path)) if path.is_file() else None
