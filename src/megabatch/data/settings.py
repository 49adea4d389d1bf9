"""The `data` section of a recipe."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from megabatch.errors import UserError
from megabatch.io.reading import MAX_FILE_MB, MEGABYTE
from megabatch.planning.batch import Count
from megabatch.planning.sizes import Side, Sizes, check_sizes

MAX_PIXELS = 89_478_485  # Pillow's limit: a quarter of a GiB in memory
IMAGE_TIMEOUT_S = 120  # longer than the failover of a file server
CENTER_CROP = 0.875  # 224 of 256
AUTO_HELD_OUT = 0.1
Share = Annotated[float, Meta(gt=0, le=1)]
Auto = Literal["auto"]
TestViews = Literal["one", "mirror", "mirror-shift"]  # see `training/evaluate.py`
NUM_VIEWS: dict[TestViews, int] = {"one": 1, "mirror": 2, "mirror-shift": 6}
Probability = Annotated[float, Meta(ge=0, le=1)]
Strength = Annotated[float, Meta(ge=0, le=10)]
Alpha = Annotated[float, Meta(ge=0, le=1000)]  # both parameters of a Beta distribution
MOST_TIMM = 10  # the largest magnitude of timm's RandAugment, which clips larger ones


class SyntheticSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of a generated data set that costs nothing to read and can be learnt, for trials and benchmarks."""

    train: Count = 10_000
    test: Count = 2_000
    classes: Annotated[int, Meta(ge=2, le=100_000)] = 10
    channels: Annotated[int, Meta(ge=1, le=1024)] = 3


class AugmentSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Augmentation beyond crops and flips.  Everything is off by default."""

    policy: Literal["none", "trivial_augment_wide", "rand_augment", "rand_augment_timm"] = "none"
    operations: Annotated[int, Meta(ge=1, le=16)] = 2  # of rand_augment and rand_augment_timm, per image
    magnitude: Annotated[int, Meta(ge=0, le=30)] = 9
    magnitude_std: Annotated[float, Meta(ge=0, le=10)] = 0.0  # this and the next two: of rand_augment_timm
    increasing: bool = False
    probability: Probability = 0.5
    brightness: Strength = 0.0  # of colour jitter, as the next three
    contrast: Strength = 0.0
    saturation: Strength = 0.0
    hue: Annotated[float, Meta(ge=0, le=0.5)] = 0.0
    erase: Probability = 0.0  # that a box of an image is erased
    erase_with: Literal["mean", "noise"] = "mean"
    repeats: Annotated[int, Meta(ge=1, le=64)] = 1  # of a sample in an epoch
    mixup: Alpha = 0.0
    cutmix: Alpha = 0.0

    def __post_init__(self) -> None:
        if self.policy == "rand_augment_timm" and self.magnitude > MOST_TIMM:
            raise UserError(
                f"data.augment.magnitude={self.magnitude} is more than data.augment.policy={self.policy} takes; "
                f"nearest: data.augment.magnitude={MOST_TIMM}"
            )
        if self.policy in ("trivial_augment_wide", "rand_augment"):
            for name, value in {"magnitude_std": self.magnitude_std, "increasing": self.increasing}.items():
                if value:
                    raise UserError(
                        f"data.augment.{name} has no effect with data.augment.policy={self.policy}; omit it, or use "
                        "data.augment.policy=rand_augment_timm"
                    )

    @property
    def jitters(self) -> bool:
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0

    @property
    def recolours(self) -> bool:
        """Whether images are changed by operations, which exist for 1 and 3 channels."""
        return self.policy != "none" or self.jitters

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


class DataSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A name of NAMED_SOURCES, a folder of class folders, of tars or of IDX files, or a .csv, .tar or .npz file.
    source: str
    multi_label: bool = False  # the class of an image is a list of labels, such as cat;dog
    # More folders, .csv files and tars, joined by class name.
    also: list[Annotated[str, Meta(min_length=1)]] = field(default_factory=list)
    image_size: Side  # of training images; the largest if `sizes` is set
    sizes: Sizes = field(default_factory=list)  # over the run; []: always `image_size`
    test_image_size: Side | None = None  # of test images; by default `image_size`
    crop_area: Share | None = None  # the smallest share of the image that a random crop covers
    crop_ratio: Annotated[float, Meta(ge=1, le=100)] = 4 / 3  # random crops: 1/crop_ratio <= width/height <= crop_ratio
    # The share of the shorter side that evaluation sees; auto: 0.875, or 1 if the images are small.
    center_crop: Share | Auto = "auto"
    crop_padding: Annotated[int, Meta(ge=0, le=8192)] = 0
    padding_mode: Literal["zeros", "reflect"] = "zeros"  # of crop_padding
    test_views: TestViews = "one"  # of a test image, whose scores are averaged
    flip: bool | Literal["alternating"] = False
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    exif_orientation: bool = False
    sampling: Literal["all", "balanced"] = "all"  # balanced: an epoch has as many images of every class
    train_per_class: Count | None = None  # training images per class; all by default
    # The share of the training images to test on.  0: the test images of the source; auto: 0.1 if it has none.
    validation: Annotated[float, Meta(ge=0, lt=1)] | Auto = 0.0
    validation_seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1  # chooses the images of the previous two
    decoder: Annotated[str, Meta(min_length=1)] = "cpu"  # of JPEGs; or a name of DECODERS (pipeline/device_decoder.py)
    on_error: Literal["raise", "skip"] = "raise"  # for an image that cannot be read
    skip_limit: Share = 0.01  # the share of the images of an epoch that may be skipped
    max_pixels: Count = MAX_PIXELS  # per encoded image
    max_file_mb: Annotated[int, Meta(ge=1, le=1_000_000)] = MAX_FILE_MB  # per encoded image
    image_timeout_s: Annotated[int, Meta(ge=1, le=86_400)] = IMAGE_TIMEOUT_S  # to read and decode an image
    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)

    def __post_init__(self) -> None:
        check_sizes(self.sizes, self.image_size)
        self.check_labels()
        if self.crop_padding >= self.image_size:
            raise UserError(
                f"data.crop_padding={self.crop_padding} must be less than data.image_size={self.image_size}, or crops "
                f"would contain only zeros; for example data.crop_padding={self.image_size // 8}"
            )
        on_cpu = ["crop_padding"] * (self.crop_padding > 0)
        on_cpu += ["augment"] * (self.augment.recolours or self.augment.erase > 0)
        if self.decoder != "cpu" and on_cpu:
            raise UserError(
                f"data.decoder={self.decoder!r} decodes on a GPU, but data.{on_cpu[0]} changes pixels on the CPU; set "
                "data.decoder=cpu"
            )

    def check_labels(self) -> None:
        """Raise UserError for settings that need one label per image."""
        if not self.multi_label:
            return
        for name, value in {
            "train_per_class": self.train_per_class,
            "sampling": None if self.sampling == "all" else self.sampling,
        }.items():
            if value is not None:
                raise UserError(
                    f"data.{name}={value} with data.multi_label=true: an image may be of several classes; omit one of "
                    "them"
                )

    @property
    def test_side(self) -> int:
        """The side of images in evaluation and of everything that uses the trained network."""
        return self.test_image_size or self.image_size

    def padding_at(self, side: int) -> int:
        """Return `crop_padding` for images of another side than `image_size`."""
        return round(self.crop_padding * side / self.image_size)

    @property
    def max_file_bytes(self) -> int:
        return self.max_file_mb * MEGABYTE

    def held_out(self, has_tests: bool) -> float:
        """Return the share of the training images to test on, given whether the source has test images."""
        if self.validation == "auto":
            return 0.0 if has_tests else AUTO_HELD_OUT
        return self.validation
