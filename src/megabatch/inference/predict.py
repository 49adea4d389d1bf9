"""Prediction of the classes of images, in batches, as fast as they are decoded."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct

from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.reader import BatchRequest, Reader
from megabatch.data.settings import DataSettings
from megabatch.data.sources.files import IMAGE_SUFFIXES, Content
from megabatch.errors import UserError
from megabatch.inference.classifier import Classifier, grey
from megabatch.io.reading import MOST_BYTES, read_file
from megabatch.text import one_line

BATCH = 64
STDIN = "-"


class Prediction(Struct, frozen=True):
    image: str
    classes: list[tuple[str, float]]  # the best ones with their probabilities
    problem: str | None = None  # why there are no classes


class NamedFiles:
    """Files by path, whose labels are their positions. `-` is the image read from standard input."""

    def __init__(self, paths: Sequence[str], content: bytes | None = None) -> None:
        self.paths, self.stdin = paths, content
        self.labels = np.arange(len(paths))

    def __len__(self) -> int:
        return len(self.paths)

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        path = self.paths[number]
        return self.stdin if self.stdin is not None and path == STDIN else read_file(path, most_bytes)

    def where(self, number: int, read: bool = True) -> str:
        return one_line(self.paths[number])

    def fingerprint(self) -> str:
        return ""


def find_images(given: Sequence[str]) -> NamedFiles:
    """Return images and the images in folders. `-` is one image on standard input, or a list of paths, one per line."""
    paths, content = list[str](), None
    for path in given:
        if path == STDIN:
            content = sys.stdin.buffer.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise UserError(f"standard input has more than {MOST_BYTES:,} bytes; give a file or a list of paths")
            listed = listed_paths(content)
            paths += [STDIN] if listed is None else listed
        elif Path(path).is_dir():
            inside = images_in(path)
            if not inside:
                raise UserError(f"{path} contains no images (suffixes {' '.join(IMAGE_SUFFIXES)}); give another folder")
            paths += inside
        elif Path(path).exists():
            paths.append(path)
        else:
            raise UserError(f"{path} does not exist; give an image, a folder of images, or - for standard input")
    return NamedFiles(paths, content)


def images_in(folder: str) -> list[str]:
    return sorted(
        os.path.join(parent, name)  # noqa: PTH118  # fast for a million names
        for parent, _, names in os.walk(folder)
        for name in names
        if name[name.rfind(".") :].lower() in IMAGE_SUFFIXES
    )


def listed_paths(content: bytes) -> list[str] | None:
    """Return the lines if all of them are paths of files, or None if the content is an image."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        return None
    paths = [line for line in lines if line.strip()]
    return paths if paths and all(Path(path).is_file() for path in paths) else None


@torch.no_grad()
def predict(classifier: Classifier, files: NamedFiles, top: int, threads: int) -> Iterator[Prediction]:
    """Yield predictions in the order of the files."""
    card = classifier.card
    settings = DataSettings(
        source="",
        image_size=card.test_image_size,
        center_crop=card.center_crop,
        exif_orientation=card.exif_orientation,
        on_error="skip",
        skip_limit=1.0,
    )
    reader = Reader(EncodedImages(files, settings, threads), classifier.normalise.device)
    chunks = np.split(np.arange(len(files)), range(BATCH, len(files), BATCH))
    with closing(reader.prefetch((partial(BatchRequest, chunk, None) for chunk in chunks), BATCH)) as batches:
        for chunk, batch in zip(chunks, batches, strict=True):
            images = grey(batch.images) if card.num_channels == 1 else batch.images
            found = {}
            if len(images):
                logits = classifier.network(classifier.normalise(images)).float()
                scores = logits.sigmoid() if card.multi_label else logits.softmax(1)
                best = scores.topk(min(top, len(classifier.classes)))
                rows = zip(batch.labels.tolist(), best.values.tolist(), best.indices.tolist(), strict=True)
                found = {number: (values, indices) for number, values, indices in rows}
            yield from (prediction(classifier, files.where(n), found.get(n), batch.skipped) for n in chunk.tolist())


def prediction(
    classifier: Classifier, image: str, found: tuple[list[float], list[int]] | None, skipped: Sequence[str]
) -> Prediction:
    if found is None:
        prefix = f"{image} cannot be read: "
        reasons = [line.removeprefix(prefix) for line in skipped if line.startswith(prefix)]
        return Prediction(image, [], reasons[0] if reasons else "it cannot be read")
    values, indices = found
    return Prediction(image, [(classifier.classes[index], value) for value, index in zip(values, indices, strict=True)])
