"""An image set that decodes files when they are read."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from megabatch.data.pipeline.augment import central_box
from megabatch.data.pipeline.decode import (
    TimedOut,
    Unreadable,
    decode_crop,
    has_one_scan,
    read_size,
    read_turn,
    resize,
)
from megabatch.data.pipeline.decoder_process import DecoderProcess
from megabatch.data.pipeline.device_decoder import CPU_DECODER, FileRead
from megabatch.data.pipeline.order import Samples
from megabatch.data.pipeline.orientation import UPRIGHT, Box
from megabatch.data.settings import CENTER_CROP, DataSettings
from megabatch.data.sources.files import Content, EncodedFiles
from megabatch.errors import UserError
from megabatch.runs.records import TimeBreakdown


class EncodedImages:
    """An `ImageSet` of files, decoded by up to `threads` threads.

    `side` is the side of the images that `read` returns, by default that of training; the images of a request may be
    smaller.  `center_crop` is the share of the shorter side that evaluation sees.  By default it is 1 for small images.
    """

    def __init__(
        self,
        files: EncodedFiles,
        settings: DataSettings,
        threads: int = 1,
        are_small: bool = False,
        side: int | None = None,
    ) -> None:
        self.files, self.settings, self.threads, self.are_small = files, settings, threads, are_small
        self.side = side or settings.image_size
        self.labels = torch.from_numpy(files.labels)
        by_default = 1.0 if are_small else CENTER_CROP
        self.center_crop = by_default if settings.center_crop == "auto" else settings.center_crop
        self.most_bytes = settings.max_file_bytes
        self.central_box = partial(central_box, share=self.center_crop)
        self.decoder: DecoderProcess | None = None  # decodes batches that are prefetched, instead of threads here

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what the decoder process needs to decode these images."""
        return EncodedImages, (self.files, self.settings, self.threads, self.are_small, self.side)

    @property
    def has_device_decoder(self) -> bool:
        return self.settings.decoder != CPU_DECODER

    @property
    def image_bytes(self) -> int:
        return 3 * self.side**2

    def __len__(self) -> int:
        return len(self.files)

    def fingerprint(self) -> str:
        """Return a hash of the files, marked if evaluation sees whole images."""
        return self.files.fingerprint() + " whole" * self.are_small

    def read(self, samples: Samples) -> torch.Tensor:
        """Return the images as evaluation sees them."""
        images = self.buffer(len(samples))
        for image, sample in zip(images, samples.tolist(), strict=True):
            try:
                self.load(sample, self.central_box, image, TimeBreakdown())
            except Unreadable as error:
                raise self.unreadable_image(sample, error) from None
        return images

    def buffer(self, count: int, pinned: bool = False) -> torch.Tensor:
        """Return memory for images, [N, 3, S, S], channels last as decoders write them."""
        return torch.empty(count, self.side, self.side, 3, dtype=torch.uint8, pin_memory=pinned).permute(0, 3, 1, 2)

    def load(
        self,
        sample: int,
        choose_box: Callable[[int, int], Box],
        out: torch.Tensor,
        spent: TimeBreakdown,
        mirrored: bool = False,
    ) -> None:
        """Load one image into `out`, [1, 3, S, S], at its side."""
        self.decode(self.content(sample, spent), choose_box, out, spent, mirrored)

    def content(self, sample: int, spent: TimeBreakdown) -> Content:
        begin_s = time.perf_counter()
        try:
            content = self.files.content(sample, self.most_bytes)
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from error
        spent.read += time.perf_counter() - begin_s
        return content

    def decode(
        self,
        content: Content,
        choose_box: Callable[[int, int], Box],
        out: torch.Tensor,
        spent: TimeBreakdown,
        mirrored: bool,
    ) -> None:
        begin_s = time.perf_counter()
        colours = "BGR" if mirrored else "RGB"
        max_pixels, turns = self.settings.max_pixels, self.settings.exif_orientation
        pixels = decode_crop(content, choose_box, out.shape[-1], max_pixels, colours, turns)
        decoded_s = time.perf_counter()
        resize(pixels, out, mirrored)
        spent.decode += decoded_s - begin_s
        spent.augment += time.perf_counter() - decoded_s

    def read_for_device(
        self, sample: int, choose_box: Callable[[int, int], Box], side: int, spent: TimeBreakdown, mirrored: bool
    ) -> FileRead:
        """Read one image for a decoder on the device.  Any image except an upright baseline JPEG is decoded here."""
        content = self.content(sample, spent)
        height, width, is_jpeg = read_size(content, self.settings.max_pixels)
        is_upright = not self.settings.exif_orientation or read_turn(content) == UPRIGHT
        if is_jpeg and has_one_scan(content) and is_upright:
            return FileRead(sample, bytes(content), choose_box(height, width), mirrored)  # reads a mapped file
        pixels = np.empty((1, side, side, 3), np.uint8)
        self.decode(content, choose_box, torch.from_numpy(pixels).permute(0, 3, 1, 2), spent, mirrored)
        return FileRead(sample, pixels[0], None)

    def unreadable_image(self, sample: int, error: Unreadable) -> UserError:
        where = self.files.where(sample, read=not isinstance(error, TimedOut))
        one = 1 / len(self)
        limit = f" data.skip_limit={round_up(one):g}" * (one > self.settings.skip_limit)
        return UserError(
            f"{where} cannot be read: {error}; fix or remove it, or skip such images with data.on_error=skip{limit}; "
            "megabatch check lists all of them"
        )


def round_up(share: float) -> float:
    """Return a share with one digit that is not smaller."""
    scale = 10.0 ** math.floor(math.log10(share))
    return min(1.0, float(f"{math.ceil(share / scale) * scale:.1g}"))


def at_side(buffer: torch.Tensor, count: int, side: int) -> torch.Tensor:
    """Return the beginning of a buffer (see `EncodedImages.buffer`) as `count` images of a side, [N, 3, S, S]."""
    return buffer.as_strided((count, 3, side, side), (3 * side * side, 1, 3 * side, 3))
