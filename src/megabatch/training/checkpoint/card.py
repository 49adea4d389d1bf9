"""The model card of a run: made when it begins, kept with its weights, read by whatever comes after."""

from pathlib import Path
from typing import Any

import msgspec

from megabatch.config.resolve import decisive_settings
from megabatch.config.schema import RunConfig
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import DataSet
from megabatch.data.pipeline.normalise import PixelStatistics
from megabatch.io.reading import read_regular
from megabatch.runs.files import MODEL
from megabatch.runs.model_card import ModelCard, decode_card
from megabatch.runs.reader import MAX_JSON_BYTES
from megabatch.runs.totals import RunTotals

# The names of folders and files decide nothing; what was in them does.
PATHS = ("data.source", "data.also", "model.weights")
PASSING = ("weights", "freeze", "compile")  # of a model, which say where it began and how it was run


def make_card(config: RunConfig, data: DataSet, pixels: PixelStatistics) -> ModelCard:
    return ModelCard(
        model={key: value for key, value in msgspec.to_builtins(config.model).items() if key not in PASSING}
        | {"channels_last": config.model.wants_channels_last},
        classes=list(data.class_names),
        num_channels=data.num_channels,
        image_size=config.data.image_size,
        center_crop=data.train.center_crop if isinstance(data.train, EncodedImages) else 1.0,  # arrays: as they are
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
            "samples_evaluated": last.samples_evaluated,
        }
    return msgspec.structs.replace(card, **results)


def pixels_of(card: ModelCard) -> PixelStatistics:
    return PixelStatistics(tuple(card.mean), tuple(card.deviation))


def read_card(folder: Path) -> ModelCard | None:
    """That of a run, as it was begun; None for a run that was killed before it wrote one."""
    path = folder / MODEL
    return decode_card(read_regular(path, MAX_JSON_BYTES), str(path)) if path.is_file() else None
