"""Photos for tests: the embedded ones, coloured and enlarged, as files of many kinds."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.decode import Pixels, decode_crop, read_size
from megabatch.data.pipeline.images import ImageSet
from megabatch.data.settings import DataSettings
from megabatch.data.sources.files import Content

CLASSES = ("ankle", "bag", "coat")


@cache
def embedded() -> ImageSet:
    return load_data_set(DataSettings(source="fashion-mnist-10k", image_size=28)).train


def photo(number: int, width: int = 90, height: int = 70) -> Image.Image:
    """Three embedded images as red, green and blue."""
    channels = embedded().read(np.array([number, number + 1, number + 2]))[:, 0].numpy()
    small = Image.fromarray(np.ascontiguousarray(channels.transpose(1, 2, 0)))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def decode(content: Content, max_pixels: int) -> Pixels:
    """The whole image, at its own size."""
    return decode_crop(content, lambda height, width: (0, 0, height, width), max_pixels, max_pixels).reshape(
        *read_size(content, max_pixels)[:2], 3
    )


def make_folder(folder: Path, per_class: int = 6, classes: tuple[str, ...] = CLASSES) -> Path:
    """A folder of class folders of JPEGs of several sizes."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            image = photo(10 * (per_class * label + number), 60 + 7 * number, 50 + 5 * label)
            (folder / name / f"{number:03d}.jpg").write_bytes(encoded(image, quality=90))
    return folder
