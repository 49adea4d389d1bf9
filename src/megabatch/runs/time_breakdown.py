"""What the time of making batches is spent on."""

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=-1e6, le=1e15)]  # a difference of clocks may be a little less than nothing


class TimeBreakdown(Struct):
    """Seconds, by what they were spent on."""

    read: Seconds = 0.0
    decode: Seconds = 0.0
    augment: Seconds = 0.0  # crop, resize, flip
    copy: Seconds = 0.0  # to the device

    @property
    def total(self) -> float:
        return self.read + self.decode + self.augment + self.copy

    def add(self, other: "TimeBreakdown", factor: float = 1.0) -> None:
        for part in self.__struct_fields__:
            setattr(self, part, getattr(self, part) + factor * getattr(other, part))

    def scaled(self, factor: float) -> "TimeBreakdown":
        result = TimeBreakdown()
        result.add(self, factor)
        return result
