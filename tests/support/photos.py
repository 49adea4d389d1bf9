"""Photos for tests: the embedded images, coloured and enlarged, in several formats."""

import io
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.decode import decode_crop, read_size
from megabatch.data.pipeline.images import ImageSet
from megabatch.data.pipeline.orientation import Pixels
from megabatch.data.settings import DataSettings
from megabatch.data.sources.files import Content, EncodedFiles, Subset
from megabatch.io.reading import MOST_BYTES

CLASSES = ("ankle", "bag", "coat")


@cache
def embedded() -> ImageSet:
    return load_data_set(DataSettings(source="fashion-mnist-10k", image_size=28)).train


def photo(number: int, width: int = 90, height: int = 70) -> Image.Image:
    """Return a photo with three embedded images as its red, green and blue channels."""
    channels = embedded().read(np.array([number, number + 1, number + 2]))[:, 0].numpy()
    small = Image.fromarray(np.ascontiguousarray(channels.transpose(1, 2, 0)))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def decode(content: Content, max_pixels: int) -> Pixels:
    """Decode the whole image at its original size."""
    return decode_crop(content, lambda height, width: (0, 0, height, width), max_pixels, max_pixels).reshape(
        *read_size(content, max_pixels)[:2], 3
    )


class HangingFiles(Subset):
    """The files of another set, of which one is never read."""

    def __init__(self, files: EncodedFiles, hanging: int) -> None:
        super().__init__(files, np.arange(len(files)))
        self.hanging = hanging

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        if number == self.hanging:
            threading.Event().wait()
        return super().content(number, most_bytes)


def make_folder(folder: Path, per_class: int = 6, classes: tuple[str, ...] = CLASSES) -> Path:
    """Write one folder per class, with JPEGs of several sizes."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            image = photo(10 * (per_class * label + number), 60 + 7 * number, 50 + 5 * label)
            (folder / name / f"{number:03d}.jpg").write_bytes(encoded(image, quality=90))
    return folder
