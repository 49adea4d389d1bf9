"""ResNet-18 to 152 (He et al. 2015), with torchvision's names: its weights load as they are, and ours load there.

As there, a bottleneck strides in its 3x3 convolution ("v1.5"), and convolutions start from He's normal distribution
over the fan-out.  Unlike there, gamma = 0 in the last BatchNorm of each residual branch is the default: a block starts
as its shortcut (Goyal et al. 2017; Jia et al. 2018 train 64K so).
"""

from functools import partial

import torch
from torch import nn


def convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class Basic(nn.Module):
    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(in_channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.relu_(self.bn1(self.conv1(x)))
        return torch.relu_(self.bn2(self.conv2(branch)).add_(self.downsample(x)))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = convolution(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = convolution(width, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = shortcut(in_channels, out_channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.relu_(self.bn1(self.conv1(x)))
        branch = torch.relu_(self.bn2(self.conv2(branch)))
        return torch.relu_(self.bn3(self.conv3(branch)).add_(self.downsample(x)))


Block = Basic | Bottleneck


def stage(block: type[Block], depth: int, in_channels: int, width: int, stride: int) -> nn.Sequential:
    first = block(in_channels, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(depth - 1)))


class ResNet(nn.Module):
    def __init__(
        self,
        block: type[Block],
        depths: tuple[int, int, int, int],
        num_classes: int,
        in_channels: int = 3,
        zero_gamma: bool = True,
    ) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(block, depths[0], 64, 64, stride=1)
        self.layer2 = stage(block, depths[1], 64 * block.expansion, 128, stride=2)
        self.layer3 = stage(block, depths[2], 128 * block.expansion, 256, stride=2)
        self.layer4 = stage(block, depths[3], 256 * block.expansion, 512, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_gamma and isinstance(module, Basic):
                nn.init.zeros_(module.bn2.weight)
            elif zero_gamma and isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(torch.relu_(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


RESNETS = {
    "resnet18": partial(ResNet, Basic, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, Basic, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, Bottleneck, (3, 8, 36, 3)),
}
resnet18, resnet34, resnet50, resnet101, resnet152 = RESNETS.values()
