"""Reference results: runs that are known to converge, with which a recipe is compared.

ResNet-50, LARS    the reference convergence points of MLPerf, target 75.9 %: trust coefficient 0.001, eps 0, poly 2,
                   end 1e-4
ResNet-50, SGD     Goyal et al. 2017: 0.1 for each 256 samples
AlexNet-BN, LARS   public code of the authors on whom Jia et al. 2018 build: trust coefficient 0.001, poly 2; it does
                   not say over how many samples BatchNorm goes.  Of 64K the abstract of Jia et al. gives epochs and
                   accuracy alone
the rest           our own recipes.  Where `top1` is None, nobody has run them to their end yet
"""

from functools import partial

from msgspec import Struct

from megabatch.data.shapes import FASHION_MNIST_10K, FULL_FASHION_MNIST, IMAGENET
from megabatch.optim.lars import TRUST_COEFFICIENT


class ReferenceResult(Struct, frozen=True, kw_only=True):
    """None: the source does not say."""

    model: str
    data: str
    optimizer: str  # "lars" with its learning rate inside or outside the momentum: they differ only while it moves
    samples: int  # of an epoch
    batch: int
    learning_rate: float | None = None  # the peak
    trust_coefficient: float = TRUST_COEFFICIENT  # the same of all results of a model, its data and LARS
    warmup_epochs: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    bn_span: int | None = None  # the samples that one BatchNorm sees
    epochs: str
    top1: float | None = None
    source: str

    @property
    def steps_per_epoch(self) -> float:
        return self.samples / self.batch


on_imagenet = partial(ReferenceResult, data="imagenet", samples=IMAGENET.num_train)


def mlperf(
    batch: int, learning_rate: float, warmup: float, momentum: float, weight_decay: float, bn_span: int, epochs: str
) -> ReferenceResult:
    return on_imagenet(
        model="resnet50",
        optimizer="lars",
        batch=batch,
        learning_rate=learning_rate,
        warmup_epochs=warmup,
        momentum=momentum,
        weight_decay=weight_decay,
        bn_span=bn_span,
        epochs=epochs,
        top1=0.759,
        source="MLPerf reference convergence point",
    )


def goyal(batch: int, learning_rate: float, warmup: float | None, top1: float | None) -> ReferenceResult:
    return on_imagenet(
        model="resnet50",
        optimizer="sgd",
        batch=batch,
        learning_rate=learning_rate,
        warmup_epochs=warmup,
        momentum=0.9,
        weight_decay=1e-4,
        bn_span=32,
        epochs="90",
        top1=top1,
        source="Goyal et al. 2017",
    )


def alexnet_bn(batch: int, learning_rate: float, warmup: float) -> ReferenceResult:
    return on_imagenet(
        model="alexnet_bn",
        optimizer="lars",
        batch=batch,
        learning_rate=learning_rate,
        warmup_epochs=warmup,
        momentum=0.9,
        weight_decay=5e-4,
        epochs="100",
        source="public code on which Jia et al. 2018 build",
    )


def fashion(
    recipe: str,
    optimizer: str,
    batch: int,
    learning_rate: float,
    warmup: float,
    bn_span: int,
    epochs: str,
    top1: float | None = None,
    is_embedded: bool = False,
    model: str = "small_resnet",
    trust_coefficient: float = TRUST_COEFFICIENT,
    samples: int | None = None,  # by default all training images
) -> ReferenceResult:
    shape = FASHION_MNIST_10K if is_embedded else FULL_FASHION_MNIST
    return ReferenceResult(
        model=model,
        data="fashion-mnist-10k" if is_embedded else "fashion-mnist",
        optimizer=optimizer,
        samples=samples or shape.num_train,
        batch=batch,
        learning_rate=learning_rate,
        trust_coefficient=trust_coefficient,
        warmup_epochs=warmup,
        momentum=0.9,
        weight_decay=5e-4,
        bn_span=bn_span,
        epochs=epochs,
        top1=top1,
        source=f"megabatch, {recipe}" + ("" if top1 else ": assumed, not run to its end yet"),
    )


REFERENCE_RESULTS = (
    mlperf(1_632, 7.4, 2, 0.9, 5e-5, 204, "33-37"),
    mlperf(3_264, 10.5, 2, 0.9, 5e-5, 204, "34-37"),
    mlperf(4_096, 10, 5, 0.9, 2e-4, 64, "39-42"),
    mlperf(8_192, 17, 5, 0.9, 2e-4, 64, "41-44"),
    mlperf(13_056, 12.8, 9, 0.9, 2.5e-5, 204, "44-46"),
    mlperf(32_768, 21.2, 16, 0.94, 2.5e-5, 128, "55-57"),
    mlperf(49_152, 19.405, 24, 0.951807, 1e-4, 256, "67-69"),
    mlperf(65_536, 24.699, 31, 0.951807, 1e-4, 128, "83-86"),
    goyal(256, 0.1, None, None),
    goyal(8_192, 3.2, 5, 0.763),
    alexnet_bn(8_192, 10, 4),
    alexnet_bn(16_384, 24, 5),
    alexnet_bn(32_768, 32, 10),
    on_imagenet(
        model="alexnet_bn",
        optimizer="lars",
        batch=65_536,
        epochs="95",
        top1=0.587,
        source="Jia et al. 2018",
    ),
    fashion("fashion", "sgd", 256, 0.2, 1, 64, "12", top1=0.9045, is_embedded=True),
    fashion("fashion at 512", "sgd", 512, 0.4, 1, 64, "12", top1=0.895, is_embedded=True),
    fashion("fashion-full", "sgd", 256, 0.2, 1, 64, "12"),
    fashion("fashion-128", "sgd", 128, 0.156, 5, 128, "40", top1=0.9195, model="shallow_cnn"),
    fashion("fashion-3k", "lars", 3_072, 4.5, 5, 128, "40", top1=0.9167, model="shallow_cnn", trust_coefficient=0.01),
    fashion("fashion-8k", "lars", 8_192, 5.92, 5, 128, "40", top1=0.9142, model="shallow_cnn", trust_coefficient=0.01),
    fashion("fashion-90-64", "sgd", 64, 0.025, 5, 64, "90", top1=0.9058, samples=20_000),
    fashion("fashion-90-1k", "lars", 1_024, 2, 5, 64, "90", top1=0.9068, trust_coefficient=0.01, samples=20_000),
    fashion("fashion-90-4k", "lars", 4_096, 10.4, 5, 64, "90", top1=0.9058, trust_coefficient=0.01, samples=20_000),
    ReferenceResult(
        model="small_cnn",
        data="synthetic",
        optimizer="sgd",
        samples=1_024,
        batch=128,
        learning_rate=0.1,
        warmup_epochs=1,
        momentum=0.9,
        bn_span=32,
        epochs="4",
        source="megabatch, smoke",
    ),
)
