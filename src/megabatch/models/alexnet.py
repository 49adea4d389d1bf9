"""AlexNet (Krizhevsky et al. 2012) in Caffe's form, with grouped convolutions, and AlexNet-BN for huge batches.

The layers of AlexNet-BN, their order (convolution, ReLU, pool, norm) and the initial weights are NVCaffe's
(borisgin/nvcaffe, models/alexnet_bn/train_val2.prototxt), for which learning rates up to batch 32K are published:
LARS compares weights with gradients, so the initial weights are part of the recipe.  Jia et al. 2018 saw the variance
of pool5's output grow with iterations, put one more BatchNorm between pool5 and fc6, and reach 58.7 % at batch 64K.

Choices that these sources do not specify:
- BatchNorm has gamma and beta.  NVCaffe's does not, but Jia et al. exclude theirs from weight decay.
- AlexNet is the same network with Caffe's local response normalisation in place of the first two BatchNorms.
- AlexNet's weights start with variance 1 / fan-in, its biases at 0.  NVCaffe's weights rely on BatchNorm: without it,
  40 steps did not reduce the loss on 32 images of noise.  He's 2 / fan-in is too large, because three max-pools amplify
  the signal as well: the first loss on ten classes was 16 and is 2.5 now.
- Images of other sizes than 224 and 227, from 39 pixels: the output of pool5 is averaged, or repeated, to 6x6.
- For studies on a desktop, `small_alexnet_bn` has an eighth of the channels, and a first convolution for 28 pixels.
  Its initial weights are larger, so that signals are as strong as in the full network.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from megabatch.models.layers import AverageTo


class Size(NamedTuple):
    channels: tuple[int, int, int, int, int] = (96, 256, 384, 384, 256)  # of the convolutions
    hidden: int = 4096  # of fc6 and fc7
    kernel: int = 11  # of conv1
    stride: int = 4
    pooled: int = 6  # the output of pool5 for images of 224 and 227 pixels


FULL = Size()
SMALL = Size(channels=(12, 32, 48, 48, 32), hidden=512, kernel=5, stride=1, pooled=3)
FAN_IN = {
    "conv1": 363,
    "conv2": 1200,
    "conv3": 2304,
    "conv4": 1728,
    "conv5": 1728,
    "fc6": 9216,
    "fc7": 4096,
    "fc8": 4096,
}


def alexnet(num_classes: int, in_channels: int = 3, dropout: float = 0.5) -> nn.Module:
    """AlexNet with 60,965,224 parameters for 1000 classes of colour images."""
    norms = [response_norm(), response_norm(), nn.Identity(), nn.Identity(), nn.Identity()]
    network = connect_layers(FULL, num_classes, in_channels, dropout, norms)
    for layer in network.children():
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            nn.init.zeros_(layer.bias)
    return network


def alexnet_bn(num_classes: int, in_channels: int = 3, dropout: float = 0.5, pool5_norm: bool = True) -> nn.Module:
    """AlexNet-BN with 60,967,976 parameters.  `pool5_norm` is the BatchNorm between pool5 and fc6."""
    network = connect_layers(FULL, num_classes, in_channels, dropout, batch_norms(FULL, pool5_norm))
    for name, layer in network.named_children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            init_like_nvcaffe(name, layer)
    return network


def small_alexnet_bn(
    num_classes: int, in_channels: int = 1, dropout: float = 0.5, pool5_norm: bool = True
) -> nn.Module:
    """AlexNet-BN with 452,474 parameters for 10 classes of grey images."""
    network = connect_layers(SMALL, num_classes, in_channels, dropout, batch_norms(SMALL, pool5_norm))
    for name, layer in network.named_children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            init_like_nvcaffe(name, layer, gain=math.sqrt(FAN_IN[name] / layer.weight[0].numel()))
    return network


def init_like_nvcaffe(name: str, layer: nn.Conv2d | nn.Linear, gain: float = 1.0) -> None:
    std, bias = (0.005, 0.1) if name in ("fc6", "fc7") else (0.01, 0.01)
    nn.init.normal_(layer.weight, std=gain * std)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)


def batch_norms(size: Size, pool5_norm: bool) -> list[nn.Module]:
    *norms, last = (nn.BatchNorm2d(channels, eps=1e-4) for channels in size.channels)
    return [*norms, last if pool5_norm else nn.Identity()]


def response_norm() -> nn.Module:
    return nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0)


def max_pool() -> nn.Module:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)  # Caffe rounds up: 224 pixels give 6x6 without padding


def connect_layers(
    size: Size, num_classes: int, in_channels: int, dropout: float, norms: Sequence[nn.Module]
) -> nn.Module:
    first, second, third, fourth, fifth = size.channels
    layers = OrderedDict(
        conv1=nn.Conv2d(in_channels, first, size.kernel, size.stride, padding=2 if size.stride == 1 else 0),
        relu1=nn.ReLU(inplace=True),
        pool1=max_pool(),
        norm1=norms[0],
        conv2=nn.Conv2d(first, second, 5, padding=2, groups=2),
        relu2=nn.ReLU(inplace=True),
        pool2=max_pool(),
        norm2=norms[1],
        conv3=nn.Conv2d(second, third, 3, padding=1),
        relu3=nn.ReLU(inplace=True),
        norm3=norms[2],
        conv4=nn.Conv2d(third, fourth, 3, padding=1, groups=2),
        relu4=nn.ReLU(inplace=True),
        norm4=norms[3],
        conv5=nn.Conv2d(fourth, fifth, 3, padding=1, groups=2),
        relu5=nn.ReLU(inplace=True),
        pool5=max_pool(),
        resize=AverageTo(size.pooled),
        norm5=norms[4],  # after resizing: it normalises what fc6 reads
        flatten=nn.Flatten(),
        fc6=nn.Linear(fifth * size.pooled**2, size.hidden),
        relu6=nn.ReLU(inplace=True),
        drop6=nn.Dropout(dropout),
        fc7=nn.Linear(size.hidden, size.hidden),
        relu7=nn.ReLU(inplace=True),
        drop7=nn.Dropout(dropout),
        fc8=nn.Linear(size.hidden, num_classes),
    )
    return nn.Sequential(layers)
