"""Which number format a run computes in."""

import torch
from msgspec import Struct

from megabatch.errors import require_one_of

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class PrecisionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "fp32"

    def __post_init__(self) -> None:
        require_one_of("precision.name", self.name, DTYPES)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]
