"""Properties of a tuning with made-up prices and times."""

import msgspec
import pytest

from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.cost import Link, bytes_crossing
from megabatch.planning.pipeline import Costs
from megabatch.planning.plan import Plan
from megabatch.planning.topology import Axis, Topology, from_hosts, regular
from megabatch.planning.tuning import Bucket, PricedPlan, Tuning


def plan_of(algorithm: str, topology: Topology) -> Plan:
    plan = ALGORITHMS[algorithm](topology.shape, "same")
    assert plan
    return plan


def tuning_of(*algorithms: str, topology: Topology, names: str = "abcdef", measured_s: float | None = None) -> Tuning:
    """Return one bucket per algorithm, ready at second 0, 1, ...; each all-reduce takes 4 s."""
    share = len(names) // len(algorithms)
    buckets = [
        Bucket(
            gradients=list(names[share * index : share * (index + 1)]),
            num_elements=1000 * (index + 1),
            dtype="fp32",
            ready_s=float(index),
            candidates=[PricedPlan(plan_of(algorithm, topology), Costs(1.0, 2.0, 1.0, True), measured_s)],
            chosen=0,
            reason="made up",
        )
        for index, algorithm in enumerate(algorithms)
    ]
    links: dict[Axis, Link] = {"all": Link(1.0, 2.0, 3.0)}
    backward_s = len(algorithms) - 1.0
    return Tuning(topology=topology, links=links, backward_s=backward_s, buckets=buckets, caps_mb=[1.0], in_parts=True)


def test_a_tuning_round_trips_through_its_type() -> None:
    tuning = tuning_of("flat", "torus", topology=from_hosts("abab"), measured_s=3.0)
    assert msgspec.json.decode(msgspec.json.encode(tuning), type=Tuning) == tuning


def test_a_measurement_scales_the_predicted_costs() -> None:
    (bucket,) = tuning_of("torus", topology=regular(2, 2), measured_s=8.0).buckets
    assert bucket.candidate.predicted_s == 4.0
    assert bucket.candidate.expected_costs == Costs(2.0, 4.0, 2.0, True)


def test_buckets_pass_through_node_and_network_in_order() -> None:
    # In the node 0-1 and 1-2; on the network 1-3 and 3-5; in the node again 3-4 and 5-6.
    tuning = tuning_of("torus", "torus", topology=regular(2, 2))
    assert [passage.end_s for passage in tuning.passages] == [4.0, 6.0]
    assert (tuning.predicted_s, tuning.exposed_s) == (6.0, 5.0)


def test_bytes_of_a_step_are_the_sum_of_its_buckets() -> None:
    topology = regular(2, 2)
    tuning = tuning_of("torus", "flat", topology=topology)
    torus, flat = (bytes_crossing(b.plan, topology, b.num_elements) for b in tuning.buckets)
    assert tuning.bytes_crossing == [torus[0] + flat[0], torus[1] + flat[1]]
    # Each node sends 2S(H-1)/H by torus; by a ring of four ranks three quarters of S twice, through one edge.
    assert tuning.bytes_crossing[0] == pytest.approx(4 * 1000 + 1.5 * 4 * 2000, rel=0.02)


def test_algorithms_lists_each_plan_once_in_order_of_buckets() -> None:
    assert tuning_of("torus", "flat", "torus", topology=regular(2, 2)).algorithms == "torus+flat"


def test_rounding_differs_between_tunings_that_may_round_differently() -> None:
    pairs = regular(2, 2)
    torus = tuning_of("torus", topology=pairs)
    assert torus.rounding == tuning_of("torus", "torus", topology=pairs).rounding  # the cut changes no sum
    others = [
        tuning_of("hierarchical", topology=pairs),
        tuning_of("torus", topology=from_hosts("abab")),
        tuning_of("torus", topology=pairs, names="abcdeg"),
        tuning_of("torus", "hierarchical", topology=pairs),
        tuning_of("flat", topology=pairs),
        tuning_of("flat", "flat", topology=pairs),  # the backend's rounding depends on the position in the bucket
    ]
    assert len({tuning.rounding for tuning in [torus, *others]}) == 7


def test_rounding_does_not_change_between_versions() -> None:
    """A run that resumes compares it with the stored value."""
    tuning = tuning_of("torus", "flat", topology=regular(2, 2))
    assert tuning.rounding == "6f3cdc77"
