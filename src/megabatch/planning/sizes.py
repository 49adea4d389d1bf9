"""The side of training images as a function of the step (progressive resizing).

Legend: N steps in the run, numbered s = 0 .. N-1; t = s / N is the share of the run that is done before step s.

A list of [share, side] changes to a side at the first step with t >= share.  A ramp has the side `from` until `start`,
then grows linearly to `to` at `end`, and stays there; sides are rounded to a multiple, halves up.  The side depends on
nothing else, so it is the same on any number of ranks and after a resume.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from megabatch.errors import UserError

SMALLEST, LARGEST = 8, 8192
MOST_SHOWN = 5  # sides in a line
BASE = 224  # pixels, of ImageNet recipes; the unit of `base_epochs`
Side = Annotated[int, Meta(ge=SMALLEST, le=LARGEST)]
ShareOfRun = Annotated[float, Meta(ge=0, le=1)]
SideFrom = tuple[ShareOfRun, Side]


class Ramp(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    first: Side = field(name="from")
    last: Side = field(name="to")
    start: ShareOfRun
    end: ShareOfRun
    multiple: Annotated[int, Meta(ge=1, le=LARGEST)] = 1

    def __post_init__(self) -> None:
        if self.start >= self.end:
            raise UserError(
                f"data.sizes: start={self.start:g} must be less than end={self.end:g}; for example start=0.4, end=0.8"
            )
        for name, side in (("from", self.first), ("to", self.last)):
            if side % self.multiple:
                nearest = max(1, round(side / self.multiple)) * self.multiple
                raise UserError(
                    f"data.sizes: {name}={side} is not a multiple of multiple={self.multiple}; "
                    f"nearest: {name}={nearest}"
                )

    def side(self, share: float) -> int:
        grown = min(max((share - self.start) / (self.end - self.start), 0.0), 1.0)
        exact = self.first + (self.last - self.first) * grown
        return math.floor(exact / self.multiple + 0.5) * self.multiple

    @property
    def sides(self) -> list[int]:
        step = self.multiple if self.last >= self.first else -self.multiple
        return list(range(self.first, self.last + step, step))


Sizes = list[SideFrom] | Ramp


class Stage(NamedTuple):
    """Consecutive steps with images of one side."""

    side: int
    first_step: int
    num_steps: int


def sides_of(sizes: Sizes) -> list[int]:
    """Return the sides in the order of the run; [] for a run with one size."""
    return sizes.sides if isinstance(sizes, Ramp) else [side for _, side in sizes]


def describe_sides(sizes: Sizes, image_size: int, test_side: int) -> str:
    """Return the sides of training and test images, such as "128 > 160 > 192 pixels, tested at 224"."""
    sides = sides_of(sizes) or [image_size]
    shown = sides if len(sides) <= MOST_SHOWN else [sides[0], sides[1], "...", sides[-1]]
    tested = "" if test_side == image_size else f", tested at {test_side}"
    return f"{' > '.join(map(str, shown))} pixels{tested}"


def check_sizes(sizes: Sizes, image_size: int) -> None:
    """Raise UserError unless shares increase from 0 and `image_size` is the largest side."""
    if not sizes:
        return
    shares = [] if isinstance(sizes, Ramp) else [share for share, _ in sizes]
    if shares and shares[0] != 0:
        raise UserError(f"data.sizes: the first share is {shares[0]:g}, but the run starts at 0; give it as [0, SIDE]")
    for before, share in pairwise(shares):
        if share <= before or share >= 1:
            rule = "must be less than 1" if share >= 1 else f"must be more than the previous one, {before:g}"
            raise UserError(
                f"data.sizes: the share {share:g} {rule}; for example data.sizes=[[0, 128], [0.4, 160], [0.75, 192]]"
            )
    largest = max(sides_of(sizes))
    if largest != image_size:
        raise UserError(
            f"data.image_size={image_size} must be the largest side of data.sizes, {largest}; "
            f"set data.image_size={largest}"
        )


def plan_stages(sizes: Sizes, image_size: int, num_steps: int) -> list[Stage]:
    """Return the stages of a run, one for a run with one size.  A stage that is too short for a step is left out."""
    if not sizes:
        return [Stage(image_size, 0, num_steps)]
    steps = range(num_steps)
    if isinstance(sizes, Ramp):
        sign = 1 if sizes.last >= sizes.first else -1
        starts = [
            bisect_left(steps, sign * side, key=lambda s: sign * sizes.side(s / num_steps)) for side in sizes.sides
        ]
    else:
        starts = [bisect_left(steps, share, key=lambda s: s / num_steps) for share, _ in sizes]
    ends = [*starts[1:], num_steps]
    return [
        Stage(side, start, end - start)
        for side, start, end in zip(sides_of(sizes), starts, ends, strict=True)
        if end > start
    ]


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage of a step; the last one for steps after the run."""
    return stages[max(0, bisect_right(stages, step, key=lambda stage: stage.first_step) - 1)]


def base_epochs(stages: Sequence[Stage], epochs_per_step: float) -> float:
    """Return the epochs of images of 224 pixels that have as many pixels as the run: a unit of compute."""
    return math.fsum(stage.num_steps * epochs_per_step * (stage.side / BASE) ** 2 for stage in stages)
