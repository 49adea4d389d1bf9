"""ResNet-18 to 152 (He et al. 2015), with torchvision's parameter names: weights can be exchanged in both directions.

As in torchvision, a bottleneck strides in its 3x3 convolution ("v1.5").  Unlike torchvision, gamma = 0 in the last
BatchNorm of each residual branch is the default: a block starts as its shortcut (Goyal et al. 2017; Jia et al. 2018
train 64K with it).

Options of published recipes:
- `init`: the distribution of the initial weights, one of INITS.
- `prior_bias`: the head's bias starts at -log(classes), so that with `loss.name="bce"` each sigmoid starts near
  1 / classes.
- `blur_pool`: blur before every strided convolution of at least 16 channels ("convolutions", as ffcv does), and also
  between the maximum and the stride of the max-pool ("all", as Composer does; Zhang 2019).  It has no parameters, so
  the names of the weights stay the same.
- `stochastic_depth`: the share of samples that skip the branch of the last block.  It rises linearly from 0 in the
  first block, as in timm (Huang et al. 2016).
- `stem`: "small" is for images of about 32 to 64 pixels: a 3x3 convolution without stride in place of the 7x7 one, and
  no max-pool, so that the first stage sees the whole image instead of a sixteenth of its pixels (He et al. 2015, 4.2).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megabatch.errors import UserError, require_one_of

BLUR_POOLS = ("none", "convolutions", "all")
STEMS = ("imagenet", "small")
LEAST_BLURRED = 16  # channels: neither ffcv nor Composer blurs images
Convolution = Callable[..., nn.Conv2d]


def convolution(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, *, is_blurred: bool = False
) -> nn.Conv2d:
    kind = BlurredConv2d if is_blurred and stride > 1 and in_channels >= LEAST_BLURRED else nn.Conv2d
    return kind(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


class BlurredConv2d(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(blur(x))


class BlurredMaxPool2d(nn.Module):
    """A max-pool of 3x3 with stride 2, blurred between the maximum and the stride."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return blur(F.max_pool2d(x, 3, stride=1, padding=1), stride=2)


def blur(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    """Convolve each channel with [1 2 1] x [1 2 1] / 16, padded with zeros: [1 2 1] / 4 is [1 1] / 2 applied twice."""
    return F.avg_pool2d(F.avg_pool2d(x, 2, stride=1, padding=1), 2, stride)


def drop_samples(branch: torch.Tensor, share: float) -> torch.Tensor:
    """Set the branch of a random `share` of the samples to 0 and scale the others, which keeps the mean."""
    mask = branch.new_empty(len(branch), 1, 1, 1).bernoulli_(1.0 - share)
    return branch * mask.div_(1.0 - share)


def shortcut(in_channels: int, out_channels: int, stride: int, convolve: Convolution) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(convolve(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class Block(nn.Module):
    expansion: int
    downsample: nn.Module
    last_norm: str  # the BatchNorm at the end of the branch
    drop_share = 0.0

    def join(self, branch: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.drop_share:
            branch = drop_samples(branch, self.drop_share)
        return torch.relu_(branch.add_(self.downsample(x)))


class Basic(Block):
    expansion = 1
    last_norm = "bn2"

    def __init__(self, in_channels: int, width: int, stride: int, convolve: Convolution = convolution) -> None:
        super().__init__()
        self.conv1 = convolve(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolve(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(in_channels, width, stride, convolve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.relu_(self.bn1(self.conv1(x)))
        return self.join(self.bn2(self.conv2(branch)), x)


class Bottleneck(Block):
    expansion = 4
    last_norm = "bn3"

    def __init__(self, in_channels: int, width: int, stride: int, convolve: Convolution = convolution) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = convolve(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolve(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = convolve(width, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = shortcut(in_channels, out_channels, stride, convolve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.relu_(self.bn1(self.conv1(x)))
        branch = torch.relu_(self.bn2(self.conv2(branch)))
        return self.join(self.bn3(self.conv3(branch)), x)


def start_as_torchvision(module: nn.Module) -> None:
    """He's normal distribution over the fan-out; the head keeps nn.Linear's uniform distribution."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def start_as_mlperf(module: nn.Module) -> None:
    """NVIDIA's MLPerf code: variance 2 / fan-in, in the head a standard deviation of 0.01 and no bias."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)


def start_as_composer(module: nn.Module) -> None:
    """MosaicML's ResNet: variance 2 / fan-in everywhere, and gamma uniform in [0, 1)."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight)


INITS = {"torchvision": start_as_torchvision, "mlperf": start_as_mlperf, "composer": start_as_composer}


def stage(
    block: type[Basic | Bottleneck], depth: int, in_channels: int, width: int, stride: int, convolve: Convolution
) -> nn.Sequential:
    first = block(in_channels, width, stride, convolve)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1, convolve) for _ in range(depth - 1)))


class ResNet(nn.Module):
    def __init__(
        self,
        block: type[Basic | Bottleneck],
        depths: tuple[int, int, int, int],
        num_classes: int,
        in_channels: int = 3,
        zero_gamma: bool = True,
        init: str = "torchvision",
        prior_bias: bool = False,
        blur_pool: str = "none",
        stochastic_depth: float = 0.0,
        stem: str = "imagenet",
    ) -> None:
        super().__init__()
        require_one_of("model.options.stem", stem, STEMS)
        require_one_of("model.options.init", init, INITS)
        require_one_of("model.options.blur_pool", blur_pool, BLUR_POOLS)
        if not 0 <= stochastic_depth < 1:
            raise UserError(
                f"model.options.stochastic_depth={stochastic_depth}: expected a share of at least 0 and less than 1; "
                "for example model.options.stochastic_depth=0.1"
            )
        convolve = partial(convolution, is_blurred=blur_pool != "none")
        self.conv1 = convolve(in_channels, 64, 3) if stem == "small" else convolve(in_channels, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        pool: nn.Module = BlurredMaxPool2d() if blur_pool == "all" else nn.MaxPool2d(3, stride=2, padding=1)
        self.maxpool = nn.Identity() if stem == "small" else pool
        self.layer1 = stage(block, depths[0], 64, 64, 1, convolve)
        self.layer2 = stage(block, depths[1], 64 * block.expansion, 128, 2, convolve)
        self.layer3 = stage(block, depths[2], 128 * block.expansion, 256, 2, convolve)
        self.layer4 = stage(block, depths[3], 256 * block.expansion, 512, 2, convolve)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        self.apply(INITS[init])
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        for place, each in enumerate(blocks):
            each.drop_share = stochastic_depth * place / (len(blocks) - 1)
            if zero_gamma:
                nn.init.zeros_(each.get_submodule(each.last_norm).weight)  # type: ignore[arg-type]
        if prior_bias:
            nn.init.constant_(self.fc.bias, -math.log(num_classes))

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
