"""Networks for 28x28 and 32x32 images that learn quickly on a CPU."""

import torch
from torch import nn

from megabatch.models.layers import AverageTo


def conv_bn_relu(in_channels: int, out_channels: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    """x + conv(conv(x)).  With gamma = 0 in the last BatchNorm the branch starts as zero (Goyal et al. 2017)."""

    def __init__(self, channels: int, zero_gamma: bool) -> None:
        super().__init__()
        self.first = conv_bn_relu(channels, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        if zero_gamma:
            nn.init.zeros_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.second(self.first(x))))


def small_resnet(
    num_classes: int,
    in_channels: int,
    width: int = 16,
    dropout: float = 0.0,
    zero_gamma: bool = True,
) -> nn.Module:
    """Three stages of one residual block each; 121,274 parameters for 10 classes of grey images."""
    return nn.Sequential(
        conv_bn_relu(in_channels, width),
        nn.MaxPool2d(2),
        Residual(width, zero_gamma),
        conv_bn_relu(width, 2 * width, stride=2),
        Residual(2 * width, zero_gamma),
        conv_bn_relu(2 * width, 4 * width, stride=2),
        Residual(4 * width, zero_gamma),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, num_classes),
    )


def small_cnn(num_classes: int, in_channels: int, width: int = 16, dropout: float = 0.0) -> nn.Module:
    """Four convolutions, no shortcuts: the plain network to compare `small_resnet` with."""
    return nn.Sequential(
        conv_bn_relu(in_channels, width),
        nn.MaxPool2d(2),
        conv_bn_relu(width, 2 * width),
        conv_bn_relu(2 * width, 4 * width, stride=2),
        conv_bn_relu(4 * width, 6 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(6 * width, num_classes),
    )


def tiny_cnn(num_classes: int, in_channels: int, width: int = 8, hidden: int = 256, dropout: float = 0.0) -> nn.Module:
    """Two convolutions and two linear layers, a miniature AlexNet-BN that learns fast, for studies of many runs."""
    return nn.Sequential(
        conv_bn_relu(in_channels, width, stride=2, size=5),
        conv_bn_relu(width, 2 * width, stride=2),
        AverageTo(7),
        nn.Flatten(),
        nn.Linear(2 * width * 7 * 7, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, num_classes),
    )


def shallow_cnn(num_classes: int, in_channels: int, width: int = 16, hidden: int = 256) -> nn.Module:
    """AlexNet's first convolution (11x11, stride 4) in miniature, and two linear layers.  It needs few steps."""
    return nn.Sequential(
        conv_bn_relu(in_channels, width, stride=4, size=7),
        AverageTo(7),
        nn.Flatten(),
        nn.Linear(width * 7 * 7, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, num_classes),
    )
