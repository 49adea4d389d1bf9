"""Photos of noise, which the self-test writes and decodes as in training."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from megabatch.config.loading import load_config
from megabatch.config.resolve import plan_run
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.batches import Stream, TrainingImages
from megabatch.ranks.world import World
from megabatch.training.prepare import decoding_in, share_of_cores

JPEGS, JPEG_SIZE, JPEG_QUALITY = 64, (500, 375), 92  # the mean size of ImageNet's photos
IMAGE_SIZE = 224  # after decoding
BATCH = 32


class DecodedPhotos(NamedTuple):
    """A stream of batches of BATCH photos."""

    stream: Stream
    num_ahead: int  # batches
    num_threads: int  # of this rank
    mean_kb: float  # of a file


@contextmanager
def decoded_photos(world: World, decoder: str) -> Iterator[DecodedPhotos]:
    """Write photos, and decode them endlessly in this context."""
    threads = share_of_cores(world)[0]
    with tempfile.TemporaryDirectory() as folder:
        mean_kb = write_jpegs(Path(folder))
        config = load_config(
            "smoke",
            [
                f"data.source={folder}",
                f"data.image_size={IMAGE_SIZE}",
                f"data.decoder={decoder}",
                "data.crop_padding=0",
                f"batch.micro={BATCH}",
                f"batch.global={BATCH * world.num_ranks}",
                "train.epochs=1000000",
            ],
        )
        data = load_data_set(config.data, threads)
        plan = plan_run(config, data.shape, world.num_ranks)
        images = TrainingImages(data.train, config.data, config.seed, plan, world.device)
        with decoding_in(config.run.decode_in, data, world.device.type), images.stream(world.rank) as stream:
            yield DecodedPhotos(stream, images.num_ahead, threads, mean_kb)


def write_jpegs(folder: Path) -> float:
    """Write photos of noise with the size of ImageNet's, and return their mean size in KB."""
    generator, num_bytes = np.random.default_rng(0), 0
    for number in range(JPEGS):
        width, height = JPEG_SIZE
        coarse = Image.fromarray(generator.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
        pixels = np.asarray(coarse.resize(JPEG_SIZE, Image.Resampling.BICUBIC), np.int16)
        grain = generator.integers(-24, 25, pixels.shape, np.int16)
        content = io.BytesIO()
        Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8)).save(content, "JPEG", quality=JPEG_QUALITY)
        for part in ("train", "val") if number < 4 else ("train",):
            path = folder / part / f"class{number % 2}" / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.getvalue())
        num_bytes += content.tell()
    return num_bytes / JPEGS / 1e3
