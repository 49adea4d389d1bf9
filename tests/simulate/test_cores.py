import math
from itertools import pairwise

import pytest
from megabatch_lab.bench.fit_cores import TimedAllReduce, Unlimited, fit_costs
from msgspec.structs import replace

from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.choosing import price
from megabatch.planning.cost import bytes_crossing
from megabatch.planning.pipeline import Gradient, RecordedBackward
from megabatch.planning.plan import CommDtype
from megabatch.planning.topology import ClusterShape
from megabatch.simulate.cluster import Cluster, Cpu, Device, EngineSettings, Network, Node
from megabatch.simulate.cores import CoreCosts, Cores, consecutive, core_seconds, cores_of, cpu_links
from megabatch.simulate.step import AllReduceSettings, Compute, choose_cut, run_step
from tests.support.simulated import COSTS

FREE = replace(
    COSTS,
    ring_s_per_byte=0.0,
    exchange_s_per_byte=0.0,
    exchange_16_s_per_byte=0.0,
    memory_s_per_byte=0.0,
    memory_step_s=0.0,
    wire_share=1.0,
    exchange_gaps=0.0,
)
LARGE = 1 << 24  # elements, many whole parts
DTYPES: tuple[CommDtype, ...] = ("same", "bf16")
SHAPES = [
    ClusterShape(sizes)
    for sizes in [((1, 2),), ((2, 2),), ((4, 2),), ((1, 3),), ((2, 4),), ((1, 1), (2, 1)), ((1, 1), (2, 1), (3, 1))]
]


def seconds(
    name: str,
    dtype: CommDtype,
    shape: ClusterShape,
    costs: CoreCosts = COSTS,
    gbps: float = 2.5,
    num_cores: float = 2,
    hosts_on_machine: bool = True,
    num_elements: int = LARGE,
) -> float:
    plan = ALGORITHMS[name](shape, dtype)
    assert plan
    links = cpu_links(shape, dtype, costs, gbps, num_cores, hosts_on_machine)
    return sum(price(plan, shape, links, num_elements)[:3])


def applying() -> list[tuple[str, CommDtype, ClusterShape]]:
    return [
        (name, dtype, shape)
        for name, algorithm in ALGORITHMS.items()
        for dtype in DTYPES
        for shape in SHAPES
        if algorithm(shape, dtype)
    ]


@pytest.mark.parametrize(("name", "dtype", "shape"), applying())
def test_a_faster_network_and_more_cores_never_take_longer(name: str, dtype: CommDtype, shape: ClusterShape) -> None:
    by_rate = [seconds(name, dtype, shape, gbps=gbps) for gbps in (0.5, 1.0, 2.5, 5.0, 100.0, math.inf)]
    by_cores = [seconds(name, dtype, shape, num_cores=num_cores) for num_cores in (1, 1.5, 2, 4, 64)]
    for times_s in (by_rate, by_cores):
        assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(times_s))
        assert times_s[0] > times_s[-1] > 0


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gbps", [0.5, 5.0, math.inf])
def test_more_ranks_than_cores_are_never_faster(name: str, dtype: CommDtype, gbps: float) -> None:
    times_s = [seconds(name, dtype, ClusterShape.regular(2, k), gbps=gbps, num_cores=2) for k in (2, 4, 6, 8)]
    # One percent: more ranks have smaller slices of the parts that fill and drain the pipeline.
    assert all(later >= 0.99 * earlier for earlier, later in pairwise(times_s))


@pytest.mark.parametrize(("name", "dtype", "shape"), applying())
def test_hosts_with_separate_cores_are_never_slower_than_on_one_machine(
    name: str, dtype: CommDtype, shape: ClusterShape
) -> None:
    apart_s = seconds(name, dtype, shape, hosts_on_machine=False)
    assert apart_s <= seconds(name, dtype, shape) * (1 + 1e-12)


@pytest.mark.parametrize(("name", "dtype", "shape"), applying())
def test_with_free_cores_the_network_of_the_busiest_host_decides(
    name: str, dtype: CommDtype, shape: ClusterShape
) -> None:
    plan = ALGORITHMS[name](shape, dtype)
    assert plan
    num_bytes = max(bytes_crossing(plan, consecutive(shape), LARGE))
    assert seconds(name, dtype, shape, FREE, gbps=1.0) == pytest.approx(8e-9 * num_bytes, rel=1e-3)


@pytest.mark.parametrize(("name", "dtype", "shape"), applying())
def test_with_a_free_network_the_work_of_cores_decides(name: str, dtype: CommDtype, shape: ClusterShape) -> None:
    plan = ALGORITHMS[name](shape, dtype)
    assert plan
    cores = cores_of(shape, 2, hosts_on_machine=True)
    work_s = core_seconds(plan, shape, LARGE, COSTS, cores)
    # Nothing overlaps with the first and the last of 16 parts in the node.
    assert work_s / 2 <= seconds(name, dtype, shape, gbps=math.inf) * (1 + 1e-9)
    assert seconds(name, dtype, shape, gbps=math.inf) <= 1.1 * work_s / 2


def test_network_bytes_of_a_ring_do_not_depend_on_ranks_per_host() -> None:
    two, four = (seconds("flat", "same", ClusterShape.regular(2, k), FREE, gbps=1.0) for k in (2, 4))
    assert two == pytest.approx(8 * 2 * 4 * LARGE * 3 / 4 / 1e9, rel=1e-3)
    assert four == pytest.approx(8 * 2 * 4 * LARGE * 7 / 8 / 1e9, rel=1e-3)


def timed(
    name: str, dtype: CommDtype, shape: ClusterShape, gbps: float, num_elements: list[int] | None = None
) -> TimedAllReduce:
    """Return the time that COSTS predict."""
    plan = ALGORITHMS[name](shape, dtype)
    assert plan
    one = TimedAllReduce(
        plan=plan, dtype=dtype, shape=shape, num_elements=num_elements or [LARGE], gbps=gbps, taken_s=0.0
    )
    return replace(one, taken_s=one.predicted_s(COSTS, 2))


def test_fit_recovers_the_costs_behind_simulated_times() -> None:
    pair, four = ClusterShape.regular(2, 1), ClusterShape.regular(2, 2)
    ring = timed("flat", "same", four, math.inf)
    in_stages = replace(COSTS, ring_s_per_byte=COSTS.exchange_s_per_byte)
    unlimited = Unlimited(
        ring=ring,
        small=timed("flat", "same", four, math.inf, [1000] * 100),
        exchange_s=ring.predicted_s(in_stages, 2),
        exchange_16=timed("flat", "bf16", four, math.inf),
        memory=timed("torus", "same", four, math.inf),
    )
    limited = [
        timed(name, dtype, shape, gbps)
        for gbps in (1.0, 2.5)
        for dtype in DTYPES
        for name, shape in (("flat", pair), ("torus", four), ("hierarchical", four), ("flat", four))
    ]
    found = fit_costs(unlimited, limited, 2, wire_share=0.95, exchange_gaps=0.5, memory_step_s=2e-5)
    for field in COSTS.__struct_fields__:
        assert getattr(found, field) == pytest.approx(getattr(COSTS, field), rel=0.02), field


def test_a_step_takes_at_least_its_core_time_and_its_network_time() -> None:
    shape = ClusterShape.regular(2, 2)
    gradients = [Gradient(4 << 22, "fp32")] * 4
    compute = Compute(0.1, RecordedBackward(["d", "c", "b", "a"], gradients, [0.05, 0.1, 0.15, 0.2]), 0.2)
    settings = AllReduceSettings(dtype="bf16", algorithm="torus")
    steps = []
    for gbps, unhidden in ((0.1, 0.0), (1.0, 0.0), (1.0, 1.0), (1e6, 0.0)):
        cluster = hosts_of_two(gbps, unhidden)
        steps.append(run_step(compute, cluster, shape, settings, choose_cut(compute, cluster, shape, settings)))
    # Two ranks per core: twice (0.1 s + 0.2 s), and the all-reduces of 64 MiB.
    plan = ALGORITHMS["torus"](shape, "bf16")
    assert plan
    work_s = core_seconds(plan, shape, 16 << 20, COSTS, Cores({2: 2}, 2))
    slow, usual, unhidden_, fast = steps
    assert fast.computing_s == pytest.approx(0.6)
    assert fast.total_s == pytest.approx(0.6 + work_s / 2)
    assert slow.total_s > 8 * 2 * (16 << 20) / 1e8  # 16 bits of each at 0.1 Gb/s: half of them twice
    assert slow.total_s > usual.total_s > fast.total_s * (1 - 1e-9)
    assert unhidden_.total_s > usual.total_s


def hosts_of_two(gbps: float, unhidden: float) -> Cluster:
    """Return hosts with these ranks on a machine of two cores."""
    costs = replace(COSTS, step_unhidden=unhidden)
    return Cluster(
        device=Device(name="", stack="", memory_gb=1, memory_gb_per_s=1, curves={}),
        node=Node(ranks=2, gb_per_s=1, alpha_us=0),
        network=Network(nics=1, gbps=gbps, efficiency=1, alpha_us=0, kind="tcp"),
        engine=EngineSettings(name="gloo", base_us=0, sums=(), in_parts=True),
        cpu=Cpu(cores=2, hosts_on_machine=True, costs=costs),
    )
