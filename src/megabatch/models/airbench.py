"""airbench94, a network for CIFAR-10 that reaches 94 % in eight epochs (Jordan 2024, arXiv 2404.00498).

whitening 2x2 > GELU > 3 x [conv > max pool 2 > BatchNorm > GELU > conv > BatchNorm > GELU] > max pool > linear / width

Facts from KellerJordan/cifar10-airbench f1c599c, airbench94_muon.py: the first layer whitens patches of pixels and is
not trained, except for its biases; the convolutions of the groups start as the identity on their first inputs; gamma
of BatchNorm stays 1; the weights of the last layer start with deviation 1, and its output is divided by its inputs.

Cost: 0.24 GFLOP for the forward pass of an image of 32 pixels.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import nn

WIDTHS = (64, 256, 256)
SMALLEST_VARIANCE = 5e-4  # added to the variances of patches, most of which are close to 0


class Whitening(nn.Conv2d):
    """A convolution whose outputs are uncorrelated over the training images, with each filter and its negative.

    Legend: x a patch of normalised pixels, u_i and v_i the eigenvectors and eigenvalues of E[x x^T].

        filters = +- u_i / sqrt(v_i + SMALLEST_VARIANCE)

    The filters are random until the trainer sets them.  They are not trained; the biases are.
    """

    def __init__(self, in_channels: int, size: int = 2) -> None:
        super().__init__(in_channels, 2 * in_channels * size**2, size)
        self.weight.requires_grad_(False)

    def filters_for(
        self, images: Iterable[torch.Tensor], mean: Sequence[float], deviation: Sequence[float]
    ) -> torch.Tensor:
        """Return the filters for training images, in fp64.

        Sums of products of bytes are exact in fp64, so the filters do not depend on the order of additions.

        Args:
            images: Batches of images, uint8 [B, C, H, W].
            mean: The mean of each channel, which the network's input is shifted by.
            deviation: Its standard deviation, which the input is divided by.
        """
        size = self.kernel_size[0]
        length = self.in_channels * size**2
        count, total, products = 0, torch.zeros(length, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for batch in images:
            patches = batch.double().unfold(2, size, 1).unfold(3, size, 1)  # [B, C, rows, columns, size, size]
            flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, length)
            count, total, products = count + len(flat), total + flat.sum(0), products + flat.T @ flat
        scale = torch.tensor(deviation, dtype=torch.float64).reciprocal().repeat_interleave(size**2)
        shift = -torch.tensor(mean, dtype=torch.float64).repeat_interleave(size**2) * scale
        cross = torch.outer(total / count * scale, shift)
        variances, vectors = torch.linalg.eigh(
            products / count * torch.outer(scale, scale) + cross + cross.T + torch.outer(shift, shift)
        )
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))  # an eigenvector has no sign
        filters = (vectors * largest.sign() / (variances + SMALLEST_VARIANCE).sqrt()).T
        return torch.cat([filters, -filters]).view(self.weight.shape)


class ConvGroup(nn.Module):
    """Two 3x3 convolutions, the first of which halves the size."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(in_channels, out_channels), norm(out_channels)
        self.conv2, self.norm2 = convolution(out_channels, out_channels), norm(out_channels)
        self.pool, self.activation = nn.MaxPool2d(2), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.norm1(self.pool(self.conv1(x))))
        return self.activation(self.norm2(self.conv2(x)))  # type: ignore[no-any-return]


def convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a convolution that starts as the identity on as many outputs as it has inputs."""
    layer = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:in_channels])
    return layer


def norm(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


class ScaledLinear(nn.Linear):
    """A linear layer without biases, whose outputs are divided by the number of its inputs."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.weight.data /= self.weight.data.std()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.in_features


def airbench94(num_classes: int, in_channels: int, widths: Sequence[int] = WIDTHS) -> nn.Module:
    """The network of airbench94; 1,972,792 parameters for 10 classes of images in colour."""
    whitening = Whitening(in_channels)
    channels = [whitening.out_channels, *widths]
    return nn.Sequential(
        whitening,
        nn.GELU(),
        *(ConvGroup(before, after) for before, after in pairwise(channels)),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        ScaledLinear(channels[-1], num_classes),
    )
