"""Seconds of a microbatch of b images: t(b) = t0 + c b."""

from typing import NamedTuple


class Line(NamedTuple):
    fixed_s: float  # t0
    per_image_s: float  # c

    def seconds(self, num_images: float) -> float:
        return self.fixed_s + self.per_image_s * num_images

    def times(self, fixed: float, per_image: float) -> "Line":
        return Line(fixed * self.fixed_s, per_image * self.per_image_s)
