"""AlexNet (Krizhevsky et al. 2012) in Caffe's form, with grouped convolutions, and AlexNet-BN for huge batches.

The layers of AlexNet-BN, their order (convolution, ReLU, pool, norm) and the initial weights are NVCaffe's
(borisgin/nvcaffe, models/alexnet_bn/train_val2.prototxt), for which learning rates up to batch 32K are published:
LARS compares weights with gradients, so where weights start belongs to the recipe.  Jia et al. 2018 saw the variance of
pool5's output grow with iterations, put one more BatchNorm between pool5 and fc6, and reach 58.7 % at batch 64K.

Our choices, where that is silent:
- BatchNorm has gamma and beta.  NVCaffe's has none, but Jia et al. take theirs out of the decay.
- AlexNet is the same network with Caffe's local response normalisation in place of the first two BatchNorms.
- AlexNet's weights start with variance 1 / fan-in, its biases at 0.  NVCaffe's weights rely on BatchNorm: without it,
  40 steps did not move the loss on 32 images of noise.  He's 2 / fan-in is too much, since three max-pools raise the
  signal as well: the first loss was 16 on ten classes, and is 2.5 so.
- Images of other sizes than 224 and 227, from 39 pixels: what pool5 gives is averaged, or repeated, to 6x6.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

POOLED = 6  # what pool5 gives for images of 224 and of 227 pixels


def alexnet(num_classes: int, in_channels: int = 3, dropout: float = 0.5) -> nn.Module:
    """60,965,224 parameters for 1000 classes of coloured images."""
    norms = [response_norm(), response_norm(), nn.Identity(), nn.Identity(), nn.Identity()]
    network = connect_layers(num_classes, in_channels, dropout, norms)
    for layer in network.children():
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            nn.init.zeros_(layer.bias)
    return network


def alexnet_bn(num_classes: int, in_channels: int = 3, dropout: float = 0.5, pool5_norm: bool = True) -> nn.Module:
    """60,967,976 parameters; without `pool5_norm`, nothing stands between pool5 and fc6."""
    norms = [batch_norm(96), batch_norm(256), batch_norm(384), batch_norm(384)]
    norms += [batch_norm(256) if pool5_norm else nn.Identity()]
    network = connect_layers(num_classes, in_channels, dropout, norms)
    for name, layer in network.named_children():
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            std, bias = (0.005, 0.1) if name in ("fc6", "fc7") else (0.01, 0.01)
            nn.init.normal_(layer.weight, std=std)
            nn.init.constant_(layer.bias, bias)
    return network


def response_norm() -> nn.Module:
    return nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0)


def batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-4)


def max_pool() -> nn.Module:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)  # Caffe rounds up: 224 pixels give 6x6 without padding


def connect_layers(num_classes: int, in_channels: int, dropout: float, norms: Sequence[nn.Module]) -> nn.Module:
    layers = OrderedDict(
        conv1=nn.Conv2d(in_channels, 96, 11, stride=4),
        relu1=nn.ReLU(inplace=True),
        pool1=max_pool(),
        norm1=norms[0],
        conv2=nn.Conv2d(96, 256, 5, padding=2, groups=2),
        relu2=nn.ReLU(inplace=True),
        pool2=max_pool(),
        norm2=norms[1],
        conv3=nn.Conv2d(256, 384, 3, padding=1),
        relu3=nn.ReLU(inplace=True),
        norm3=norms[2],
        conv4=nn.Conv2d(384, 384, 3, padding=1, groups=2),
        relu4=nn.ReLU(inplace=True),
        norm4=norms[3],
        conv5=nn.Conv2d(384, 256, 3, padding=1, groups=2),
        relu5=nn.ReLU(inplace=True),
        pool5=max_pool(),
        resize=nn.AdaptiveAvgPool2d(POOLED),
        norm5=norms[4],  # after resizing: it normalises what fc6 reads
        flatten=nn.Flatten(),
        fc6=nn.Linear(256 * POOLED**2, 4096),
        relu6=nn.ReLU(inplace=True),
        drop6=nn.Dropout(dropout),
        fc7=nn.Linear(4096, 4096),
        relu7=nn.ReLU(inplace=True),
        drop7=nn.Dropout(dropout),
        fc8=nn.Linear(4096, num_classes),
    )
    return nn.Sequential(layers)
