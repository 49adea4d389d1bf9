"""Which all-reduce a bucket takes: one plan for all, until `tune` has chosen one for each."""

from typing import NamedTuple

from megabatch.comm.settings import CommSettings
from megabatch.errors import UserError
from megabatch.planning.candidates import candidate_plans, default_plan
from megabatch.planning.plan import CommDtype, Plan
from megabatch.planning.topology import Axis, ClusterShape
from megabatch.planning.tuning import Tuning


class Cluster(NamedTuple):
    """What decides which plans can run."""

    shape: ClusterShape
    in_memory: bool  # ranks of a host all-reduce through its memory
    is_cuda: bool


class PlansInUse:
    def __init__(self, settings: CommSettings, cluster: Cluster, tunes: bool) -> None:
        self.default = require_plan(settings.algorithm, settings.dtype, cluster)
        self.exact = require_plan(settings.algorithm, "fp32", cluster)  # of the step's metrics: nothing is rounded
        self.candidates = [self.default]
        if tunes:
            self.candidates = candidate_plans(
                settings.algorithm, settings.dtype, cluster.shape, cluster.in_memory, cluster.is_cuda
            )
        self.tuning: Tuning | None = None  # None: the default plan for all
        self.drift = 1.0  # see planning.choosing.drift

    @property
    def axes(self) -> set[Axis]:
        return {phase.axis for plan in (self.default, self.exact, *self.candidates) for phase in plan.phases}

    def plan_of(self, index: int, num_elements: int) -> Plan:
        """Before DDP has made its final buckets, after the first backward, they are not those of the tuning."""
        buckets = self.tuning.buckets if self.tuning else []
        is_tuned = index < len(buckets) and buckets[index].num_elements == num_elements
        return buckets[index].plan if is_tuned else self.default

    @property
    def names(self) -> str:
        return self.tuning.algorithms if self.tuning else self.default.name


def require_plan(algorithm: str, dtype: CommDtype, cluster: Cluster) -> Plan:
    plan = default_plan(algorithm, dtype, cluster.shape, cluster.in_memory)
    if plan is None:
        sizes = " and ".join(str(size) for size, _ in cluster.shape.node_sizes)
        raise UserError(
            f"comm.algorithm={algorithm!r} needs hosts with equally many ranks, not {sizes}; "
            "nearest: comm.algorithm=hierarchical"
        )
    return plan
