"""What the time of making batches goes into."""

from msgspec import Struct


class Stages(Struct):
    """Seconds, by what they were spent on."""

    read: float = 0.0
    decode: float = 0.0
    augment: float = 0.0  # crop, resize, flip
    copy: float = 0.0  # to the device

    @property
    def total(self) -> float:
        return self.read + self.decode + self.augment + self.copy

    def add(self, other: "Stages", factor: float = 1.0) -> None:
        for stage in self.__struct_fields__:
            setattr(self, stage, getattr(self, stage) + factor * getattr(other, stage))

    def scaled(self, factor: float) -> "Stages":
        result = Stages()
        result.add(self, factor)
        return result
