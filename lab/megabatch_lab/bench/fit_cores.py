"""Fit the core costs of simulate/cores.py to all-reduces measured on two hosts of one machine.

Without a network limit (infinite gbps) an all-reduce takes the time of the cores, and each kind of all-reduce gives one
cost.  With a limit, the time beyond the longer of network and cores is the part of the shorter one that is not hidden;
the median over measurements is used.  The cost of small tensors is fitted as the latency of a step.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from megabatch.planning.choosing import price
from megabatch.planning.pipeline import pass_through
from megabatch.planning.plan import CommDtype, Plan
from megabatch.planning.topology import ClusterShape
from megabatch.simulate.cores import CoreCosts, cpu_links, in_stages

MAX_STEP_S, HALVINGS = 0.1, 40


class TimedAllReduce(Struct, frozen=True, kw_only=True):
    """A measured all-reduce of fp32 tensors, one after another, on hosts that share a machine."""

    plan: Plan
    dtype: CommDtype  # between hosts
    shape: ClusterShape
    num_elements: list[int]  # of each tensor
    gbps: float
    taken_s: float

    def predicted_s(self, costs: CoreCosts, num_cores: float) -> float:
        links = cpu_links(self.shape, self.dtype, costs, self.gbps, num_cores, hosts_on_machine=True)
        prices = [price(self.plan, self.shape, links, size) for size in self.num_elements]
        return pass_through([0.0] * len(prices), prices)[-1].end_s

    @property
    def unhidden(self) -> str:
        """Return the name of the cost for the part that is not hidden."""
        axis = next(phase.axis for phase in self.plan.phases if phase.axis != "node")
        if in_stages(axis, self.shape, self.dtype):
            return "exchange_unhidden"
        return "leaders_unhidden" if axis == "leaders" and self.shape.largest_node > 1 else "unhidden"


class Unlimited(Struct, frozen=True, kw_only=True):
    """All-reduces without a network limit."""

    ring: TimedAllReduce  # the backend's all-reduce of one large tensor over all ranks
    small: TimedAllReduce  # of many tensors
    exchange_s: float  # the same as `ring`, in stages
    exchange_16: TimedAllReduce  # in stages, with 16 bits between hosts
    memory: TimedAllReduce  # torus: in shared memory, and by the backend between two hosts


def fit_costs(
    unlimited: Unlimited,
    limited: Sequence[TimedAllReduce],
    num_cores: float,
    *,
    wire_share: float,
    exchange_gaps: float,
    memory_step_s: float,
) -> CoreCosts:
    costs = CoreCosts(
        ring_s_per_byte=0.0,
        exchange_s_per_byte=0.0,
        exchange_16_s_per_byte=0.0,
        memory_s_per_byte=0.0,
        step_s=0.0,
        memory_step_s=memory_step_s,
        wire_share=wire_share,
        exchange_gaps=exchange_gaps,
        unhidden=0.0,
        leaders_unhidden=0.0,
        exchange_unhidden=0.0,
    )
    in_stages_s = replace(unlimited.ring, taken_s=unlimited.exchange_s)
    costs = replace(
        costs,
        ring_s_per_byte=solve("ring_s_per_byte", [unlimited.ring], costs, num_cores),
        exchange_s_per_byte=solve("ring_s_per_byte", [in_stages_s], costs, num_cores),
        exchange_16_s_per_byte=solve("exchange_16_s_per_byte", [unlimited.exchange_16], costs, num_cores),
    )
    costs = replace(costs, step_s=fit_step(unlimited.small, costs, num_cores))
    costs = replace(costs, memory_s_per_byte=solve("memory_s_per_byte", [unlimited.memory], costs, num_cores))
    parts = {}
    for name in ("unhidden", "leaders_unhidden", "exchange_unhidden"):
        parts[name] = min(1.0, solve(name, [one for one in limited if one.unhidden == name], costs, num_cores))
    return replace(costs, **parts)


def solve(name: str, timed: Sequence[TimedAllReduce], costs: CoreCosts, num_cores: float) -> float:
    """Return the cost `name`, at least 0, that explains the measured times; the median over measurements."""
    without: Any = replace(costs, **{name: 0.0})
    with_one: Any = replace(costs, **{name: 1.0})
    found = []
    for one in timed:
        least_s = one.predicted_s(without, num_cores)
        found.append((one.taken_s - least_s) / (one.predicted_s(with_one, num_cores) - least_s))
    return max(0.0, statistics.median(found))


def fit_step(small: TimedAllReduce, costs: CoreCosts, num_cores: float) -> float:
    """Return the latency of a step that explains the measured time, by bisection: the prediction is monotonic."""
    low_s, high_s = 0.0, MAX_STEP_S
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        if small.predicted_s(replace(costs, step_s=middle_s), num_cores) < small.taken_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s
