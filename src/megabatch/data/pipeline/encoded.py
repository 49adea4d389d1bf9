"""Images that are decoded when they are asked for."""

import time
from collections.abc import Callable
from functools import partial

import torch

from megabatch.data.pipeline.augment import central_box
from megabatch.data.pipeline.decode import Box, TooLate, Unreadable, decode_crop, resize
from megabatch.data.pipeline.order import Samples
from megabatch.data.settings import CENTER_CROP, DataSettings
from megabatch.data.sources.files import EncodedFiles
from megabatch.errors import UserError
from megabatch.runs.records import TimeBreakdown


class EncodedImages:
    """An `ImageSet` of files.  `threads` is how many may decode at once.

    `center_crop` is what evaluation sees of the shorter side: by default all of it where images are small.
    """

    def __init__(self, files: EncodedFiles, settings: DataSettings, threads: int = 1, are_small: bool = False) -> None:
        self.files, self.settings, self.threads, self.are_small = files, settings, threads, are_small
        self.labels = torch.from_numpy(files.labels)
        by_default = 1.0 if are_small else CENTER_CROP
        self.center_crop = by_default if settings.center_crop == "auto" else settings.center_crop
        self.most_bytes = settings.most_bytes
        self.central_box = partial(central_box, share=self.center_crop)

    def __len__(self) -> int:
        return len(self.files)

    def fingerprint(self) -> str:
        """Of the files; and of how they are seen, where that was not always the default."""
        return self.files.fingerprint() + " whole" * self.are_small

    def read(self, samples: Samples) -> torch.Tensor:
        """As evaluation sees them."""
        images = self.buffer(len(samples))
        for image, sample in zip(images, samples.tolist(), strict=True):
            try:
                self.load(sample, self.central_box, image, TimeBreakdown())
            except Unreadable as error:
                raise self.complaint(sample, error) from None
        return images

    def buffer(self, count: int, pinned: bool = False) -> torch.Tensor:
        """Room for images, in the order in which decoders write: [N, 3, S, S], channels last."""
        size = self.settings.image_size
        return torch.empty(count, size, size, 3, dtype=torch.uint8, pin_memory=pinned).permute(0, 3, 1, 2)

    def load(
        self,
        sample: int,
        choose_box: Callable[[int, int], Box],
        out: torch.Tensor,
        spent: TimeBreakdown,
        mirrored: bool = False,
    ) -> None:
        """One image into `out`, [1, 3, S, S]."""
        begun_s = time.perf_counter()
        try:
            content = self.files.content(sample, self.most_bytes)
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from error
        read_s = time.perf_counter()
        colours = "BGR" if mirrored else "RGB"
        pixels = decode_crop(content, choose_box, self.settings.image_size, self.settings.max_pixels, colours)
        decoded_s = time.perf_counter()
        resize(pixels, out, mirrored)
        spent.read += read_s - begun_s
        spent.decode += decoded_s - read_s
        spent.augment += time.perf_counter() - decoded_s

    def complaint(self, sample: int, error: Unreadable) -> UserError:
        where = self.files.where(sample, read=not isinstance(error, TooLate))
        return UserError(
            f"{where} cannot be read: {error}; fix or remove it, or skip such images with data.on_error=skip"
        )
