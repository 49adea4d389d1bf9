"""What a recipe can say about images."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from megabatch.errors import UserError
from megabatch.io.reading import MAX_FILE_MB, MEGABYTE
from megabatch.planning.batch import Count

MAX_PIXELS = 89_478_485  # as Pillow has it: a quarter of a GiB in memory
IMAGE_TIMEOUT_S = 120  # longer than it takes a file server to be replaced by another
CENTER_CROP = 0.875  # 224 of 256
AUTO_HELD_OUT = 0.1
Share = Annotated[float, Meta(gt=0, le=1)]
Auto = Literal["auto"]


class SyntheticSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images that cost nothing to read and can still be learnt, for trials and benchmarks."""

    train: Count = 10_000
    test: Count = 2_000
    classes: Annotated[int, Meta(ge=2, le=100_000)] = 10
    channels: Annotated[int, Meta(ge=1, le=1024)] = 3


class DataSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str  # a name of NAMED_SOURCES, a folder of class folders, of tars or of IDX files, a .tar or an .npz file
    # Further folders and tars, joined by the names of their classes.
    also: list[Annotated[str, Meta(min_length=1)]] = field(default_factory=list)
    image_size: Annotated[int, Meta(ge=8, le=8192)]
    crop_area: Share | None = None  # a random crop takes this share of the image, or more
    crop_ratio: Annotated[float, Meta(ge=1, le=100)] = 4 / 3  # the widest random crop, and its inverse the highest
    # Of the shorter side, where images are not cropped at random; auto: 0.875, or 1 if they are small already.
    center_crop: Share | Auto = "auto"
    crop_padding: Annotated[int, Meta(ge=0, le=8192)] = 0
    flip: bool = False
    train_per_class: Count | None = None  # so many training images of each class; by default all
    # Of the training images, to test on; 0 takes the source's own; auto: a tenth where the source has none.
    validation: Annotated[float, Meta(ge=0, lt=1)] | Auto = 0.0
    validation_seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1  # chooses these, and those of train_per_class
    on_error: Literal["raise", "skip"] = "raise"  # where an image cannot be read
    skip_limit: Share = 0.01  # of the images of an epoch, that may be skipped
    max_pixels: Count = MAX_PIXELS  # of an encoded image
    max_file_mb: Annotated[int, Meta(ge=1, le=1_000_000)] = MAX_FILE_MB  # of one, encoded
    image_timeout_s: Annotated[int, Meta(ge=1, le=86_400)] = IMAGE_TIMEOUT_S  # to read and decode one
    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)

    def __post_init__(self) -> None:
        if self.crop_padding >= self.image_size:
            raise UserError(
                f"data.crop_padding={self.crop_padding} is no less than data.image_size={self.image_size}: crops would "
                f"hold nothing but zeros; for example data.crop_padding={self.image_size // 8}"
            )

    @property
    def most_bytes(self) -> int:
        return self.max_file_mb * MEGABYTE

    def held_out(self, has_tests: bool) -> float:
        """The share of the training images that is tested on, of a source with or without test images of its own."""
        if self.validation == "auto":
            return 0.0 if has_tests else AUTO_HELD_OUT
        return self.validation
