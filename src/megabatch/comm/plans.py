"""Which all-reduce a bucket takes: one plan for all, until `tune` has chosen one for each."""

from megabatch.comm.settings import CommSettings
from megabatch.errors import UserError
from megabatch.planning.candidates import candidate_plans, default_plan
from megabatch.planning.plan import CommDtype, Plan, axes_of
from megabatch.planning.topology import Axis, ClusterShape
from megabatch.planning.tuning import Tuning


class PlansInUse:
    """`in_memory`: ranks of a host all-reduce through its memory.  `tunes`: there may be a choice."""

    def __init__(
        self, settings: CommSettings, shape: ClusterShape, in_memory: bool, on_accelerators: bool, tunes: bool
    ) -> None:
        algorithm = settings.algorithm
        self.default = require_plan(algorithm, settings.dtype, shape, in_memory)
        self.exact = require_plan(algorithm, "fp32", shape, in_memory)  # of the step's metrics: nothing is rounded
        self.candidates = [self.default]
        if tunes:
            self.candidates = candidate_plans(algorithm, settings.dtype, shape, in_memory, on_accelerators)
        self.tuning: Tuning | None = None  # None: the default plan for all
        self.drift = 1.0  # see planning.choosing.drift
        self.is_chosen_again = False  # what was stored is not for these ranks and gradients

    @property
    def axes(self) -> set[Axis]:
        """Of all plans that a bucket may take: until `tune` has chosen, of all candidates."""
        chosen = [bucket.plan for bucket in self.tuning.buckets] if self.tuning else self.candidates
        return axes_of([self.default, self.exact, *chosen])

    def plan_of(self, index: int, num_elements: int) -> Plan:
        """Before DDP has made its final buckets, after the first backward, they are not those of the tuning."""
        buckets = self.tuning.buckets if self.tuning else []
        is_tuned = index < len(buckets) and buckets[index].num_elements == num_elements
        return buckets[index].plan if is_tuned else self.default

    @property
    def names(self) -> str:
        return self.tuning.algorithms if self.tuning else self.default.name


def require_plan(algorithm: str, dtype: CommDtype, shape: ClusterShape, in_memory: bool) -> Plan:
    plan = default_plan(algorithm, dtype, shape, in_memory)
    if plan is None:
        sizes = " and ".join(str(size) for size, _ in shape.node_sizes)
        raise UserError(
            f"comm.algorithm={algorithm!r} needs hosts with equally many ranks, not {sizes}; "
            "nearest: comm.algorithm=hierarchical"
        )
    return plan
