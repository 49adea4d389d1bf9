"""What the time of making batches is spent on."""

from msgspec import Struct


class TimeBreakdown(Struct):
    """Seconds, by what they were spent on."""

    read: float = 0.0
    decode: float = 0.0
    augment: float = 0.0  # crop, resize, flip
    copy: float = 0.0  # to the device

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
