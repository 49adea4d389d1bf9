"""The times of forward, backward and update of one rank, as recorded by `megabatch profile`.

Legend: b images per microbatch.  At a recorded b, times are the recorded ones.  At any other b they follow
    t(b) = t0 + c b,    t0, c >= 0,
by least squares of the time per image, t/b = c + t0/b, so that a relative error counts the same at every b.
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from megabatch.errors import UserError
from megabatch.io.reading import LONGEST_JSON, NotText, Undecodable, decode_json, read_bytes
from megabatch.planning.pipeline import ELEMENT_BYTES, Gradient, GradientDtype, RecordedBackward
from megabatch.simulate.device import Line

FORMAT = 1
Count = Annotated[int, Meta(ge=1, le=10**12)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]  # a day, for one pass


def fit_line(num_images: Sequence[float], seconds: Sequence[float]) -> Line:
    inverse = [1 / b for b in num_images]
    per_image_s = [t / b for b, t in zip(num_images, seconds, strict=True)]
    fixed_s, slope_s = statistics.linear_regression(inverse, per_image_s)
    if fixed_s < 0:
        return Line(0.0, statistics.fmean(per_image_s))
    if slope_s < 0:
        return Line(statistics.linear_regression(inverse, per_image_s, proportional=True).slope, 0.0)
    return Line(fixed_s, slope_s)


class ProfiledGradient(Struct, frozen=True, kw_only=True):
    name: str
    num_elements: Count
    dtype: GradientDtype


class ProfilePoint(Struct, frozen=True, kw_only=True):
    """Medians over several passes of one microbatch."""

    microbatch: Count
    forward_s: Seconds  # with the normalisation of images and the loss
    backward_s: Seconds
    forward_by_layer_s: dict[str, Seconds]  # by leaf module, timed in separate passes because hooks slow them
    ready_s: list[Seconds]  # of each gradient, since backward started


class Profile(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    model: str
    image_size: Count
    num_classes: Count
    precision: str
    device: str
    threads: Count
    gradients: list[ProfiledGradient]  # in the order of backward
    points: list[ProfilePoint]  # ascending by microbatch
    update_s: Seconds  # of the weights, once per step

    def __post_init__(self) -> None:
        sizes = self.microbatches
        if len(sizes) < 2 or sizes != sorted(set(sizes)):
            raise ValueError(f"microbatches {sizes}: expected at least two, ascending")
        names = [gradient.name for gradient in self.gradients]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{len(names)} gradients of {len(set(names))} names: expected at least one, each once")
        for point in self.points:
            times_s = [0.0, *point.ready_s, point.backward_s]
            if len(point.ready_s) != len(names) or times_s != sorted(times_s):
                raise ValueError(
                    f"ready_s at microbatch {point.microbatch}: expected {len(names)} ascending times, none after "
                    f"backward_s={point.backward_s:g}"
                )
            if not point.forward_s or not point.backward_s:
                raise ValueError(f"a pass of microbatch {point.microbatch} takes no time")

    @property
    def microbatches(self) -> list[int]:
        return [point.microbatch for point in self.points]

    @property
    def forward_line(self) -> Line:
        return self.fit([point.forward_s for point in self.points])

    @property
    def backward_line(self) -> Line:
        return self.fit([point.backward_s for point in self.points])

    def forward_s(self, microbatch: float) -> float:
        return self.at(microbatch, [point.forward_s for point in self.points])

    def backward_s(self, microbatch: float) -> float:
        return self.at(microbatch, [point.backward_s for point in self.points])

    def backward(self, microbatch: float) -> RecordedBackward:
        end_s = self.backward_s(microbatch)
        by_gradient = zip(*(point.ready_s for point in self.points), strict=True)
        # Lines fitted separately can cross outside the recorded range, but gradients are ready in order.
        ready_s = itertools.accumulate((self.at(microbatch, times_s) for times_s in by_gradient), max)
        return RecordedBackward(
            [gradient.name for gradient in self.gradients],
            [Gradient(g.num_elements * ELEMENT_BYTES[g.dtype], g.dtype) for g in self.gradients],
            [min(time_s, end_s) for time_s in ready_s],
        )

    def at(self, microbatch: float, seconds: Sequence[float]) -> float:
        """Return the time at `microbatch`, recorded or fitted, given the times at all points."""
        recorded = dict(zip(self.microbatches, seconds, strict=True))
        return recorded[int(microbatch)] if microbatch in recorded else self.fit(seconds).seconds(microbatch)

    def fit(self, seconds: Sequence[float]) -> Line:
        return fit_line(self.microbatches, seconds)


class LayerTime(NamedTuple):
    name: str
    forward_s: float
    backward_s: float  # since the previous gradients, including modules between them without gradients
    num_parameters: int


def layer_times(profile: Profile, point: ProfilePoint) -> list[LayerTime]:
    """Return the times of leaf modules and of modules with gradients, in the order of forward."""
    backward_s: dict[str, float] = {}
    num_parameters: dict[str, int] = {}
    before_s = [0.0, *point.ready_s]
    for gradient, began_s, ready_s in zip(profile.gradients, before_s, point.ready_s, strict=False):
        owner = gradient.name.rpartition(".")[0]
        backward_s[owner] = backward_s.get(owner, 0.0) + ready_s - began_s
        num_parameters[owner] = num_parameters.get(owner, 0) + gradient.num_elements
    names = dict.fromkeys([*point.forward_by_layer_s, *reversed(backward_s)])
    return [
        LayerTime(name, point.forward_by_layer_s.get(name, 0.0), backward_s.get(name, 0.0), num_parameters.get(name, 0))
        for name in names
    ]


class FormatField(Struct):
    format: int


def read_profile(path: Path) -> Profile:
    again = "record it again: megabatch profile RECIPE --json FILE"
    try:
        content = read_bytes(path, LONGEST_JSON)
        found = decode_json(content, FormatField).format
        if found != FORMAT:
            raise UserError(f"{path} has format {found}, but this version reads {FORMAT}; {again}")
        return decode_json(content, Profile)
    except OSError as error:
        raise UserError(f"profile {path} cannot be read ({error.strerror}); {again}") from None
    except (NotText, Undecodable) as error:
        raise UserError(f"{path} is not a profile ({error}); {again}") from None
