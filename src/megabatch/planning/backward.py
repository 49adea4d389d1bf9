"""What a backward pass yields: gradients in the order in which they appear, and when each is ready to travel."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

GradientDtype = Literal["fp32", "fp64", "bf16", "fp16"]
ELEMENT_BYTES: dict[GradientDtype, int] = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}


class Gradient(NamedTuple):
    num_bytes: int
    dtype: GradientDtype


class RecordedBackward(NamedTuple):
    names: Sequence[str]
    gradients: Sequence[Gradient]
    ready_s: Sequence[float]  # since backward began
