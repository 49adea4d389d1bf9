"""Settings of the all-reduce: the [comm] section of a recipe and the arguments of `attach`."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from megabatch.errors import require_one_of
from megabatch.planning.algorithms import ALGORITHMS, ON_REQUEST
from megabatch.planning.plan import COMM_DTYPES, CommDtype

WEEK_S = 7 * 86_400


class CommSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    algorithm: str = "auto"  # auto, or one of planning.algorithms
    dtype: CommDtype = "same"  # comm dtype between nodes; same: the dtype of the gradients
    bucket_mb: Annotated[float, Meta(gt=0, le=10**6)] | Literal["auto"] = "auto"  # maximum size of a bucket
    timeout_s: Annotated[float, Meta(ge=0.1, le=WEEK_S)] = (
        60.0  # after start-up; a rank that is stuck for longer is named
    )
    timeline: bool = False  # every rank writes a timeline

    def __post_init__(self) -> None:
        require_one_of("comm.algorithm", self.algorithm, ["auto", *ALGORITHMS, *ON_REQUEST])
        require_one_of("comm.dtype", self.dtype, COMM_DTYPES)
