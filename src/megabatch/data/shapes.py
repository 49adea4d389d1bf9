"""How large data sets are: all that a plan or a network has to know of them."""

from msgspec import Struct

MOST_CLASSES = 1_000_000  # more is not a label but some other number


class DataShape(Struct, frozen=True, kw_only=True):
    num_train: int
    num_test: int
    num_classes: int
    num_channels: int
    warnings: tuple[str, ...] = ()  # about its classes


FASHION_MNIST_10K = DataShape(num_train=10_000, num_test=2_000, num_classes=10, num_channels=1)
FULL_FASHION_MNIST = DataShape(num_train=60_000, num_test=10_000, num_classes=10, num_channels=1)
IMAGENET = DataShape(num_train=1_281_167, num_test=50_000, num_classes=1000, num_channels=3)  # of 2012
