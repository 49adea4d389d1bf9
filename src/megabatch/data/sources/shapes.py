"""Sizes of data sets, as plans and models need them."""

from typing import NamedTuple

from msgspec import Struct

from megabatch.errors import UserError

MOST_CLASSES = 1_000_000  # a larger number is probably not a label


class DataShape(Struct, frozen=True, kw_only=True):
    num_train: int
    num_test: int
    num_classes: int
    num_channels: int
    warnings: tuple[str, ...] = ()  # about its classes


class KnownSet(NamedTuple):
    """A data set of constant size, for which plans do not need the images."""

    shape: DataShape
    smallest_class: int  # training images of the smallest class

    def part(self, train_per_class: int | None, held_out: float) -> DataShape:
        """Return the shape after `data.train_per_class` and `data.validation` are applied.

        All classes are assumed to be equally large.  Those of ImageNet are not, so a held-out share of it is accurate
        to half an image per class.
        """
        whole = self.shape
        if train_per_class is not None and train_per_class > self.smallest_class:
            raise UserError(
                f"data.train_per_class={train_per_class}: the smallest class has {self.smallest_class:,} training "
                f"images; nearest: data.train_per_class={self.smallest_class}"
            )
        num_train = whole.num_train if train_per_class is None else train_per_class * whole.num_classes
        if not held_out:
            num_test = whole.num_test
        elif num_train % whole.num_classes:
            num_test = round(held_out * num_train)
            num_train -= num_test
        else:
            per_class = num_train // whole.num_classes
            if per_class == 1:
                raise UserError(
                    f"data.validation={held_out:g}: data.train_per_class={train_per_class} leaves 1 training image "
                    "per class; give data.train_per_class=2 or more"
                )
            num_test = min(max(round(held_out * per_class), 1), per_class - 1) * whole.num_classes
            num_train -= num_test
        return DataShape(
            num_train=num_train,
            num_test=num_test,
            num_classes=whole.num_classes,
            num_channels=whole.num_channels,
        )


FASHION_MNIST_10K = DataShape(num_train=10_000, num_test=2_000, num_classes=10, num_channels=1)
FULL_FASHION_MNIST = DataShape(num_train=60_000, num_test=10_000, num_classes=10, num_channels=1)
IMAGENET = DataShape(num_train=1_281_167, num_test=50_000, num_classes=1000, num_channels=3)  # ILSVRC 2012

KNOWN_SETS = {
    "fashion-mnist-10k": KnownSet(FASHION_MNIST_10K, smallest_class=1_000),
    "fashion-mnist": KnownSet(FULL_FASHION_MNIST, smallest_class=6_000),
    "imagenet": KnownSet(IMAGENET, smallest_class=732),
}
