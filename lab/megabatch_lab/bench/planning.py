"""megabatch bench planning: how long the choice of buckets and plans takes, on clusters that nobody has to start.

ResNet-50's 161 fp32 gradients on nodes of 8 ranks, 256 of them (2,048 ranks) and 2,048 (16,384); flat, hierarchical and
torus are the candidates, with bf16 between nodes.  Gradients are ready at times that are their share of the parameters
of a backward pass of 100 ms.  The links are made up, of the order of GPUs that share a switch and a network card per
node: nothing here says how fast such a cluster is, only how fast it is planned.
    axis         latency    bytes      adding up
    node           3 us     150 GB/s   600 GB/s
    leaders       10 us      25 GB/s   600 GB/s   one rank has the card
    inter_node    10 us       3 GB/s   600 GB/s   the 8 ranks of a node share it
    all           10 us       3 GB/s   600 GB/s
choose_s           of `choose`, which prices, cuts and decides; the median over rounds
bytes_crossing_s   of `Tuning.bytes_crossing`, which answers for every node; the median over rounds
median_mb_from_a_node   what it answers, of the median node
"""

import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.choosing import choose
from megabatch.planning.cost import Link
from megabatch.planning.pipeline import ELEMENT_BYTES, Gradient, RecordedBackward
from megabatch.planning.topology import Axis, regular
from megabatch_lab.bench.gradient_sets import gradient_sizes
from megabatch_lab.bench.report import report

MODEL, BACKWARD_S = "resnet50", 0.1
CLUSTERS = ((256, 8), (2048, 8))  # nodes, ranks of each
ADDING_UP = 1 / 600e9
LINKS: dict[Axis, Link] = {
    "node": Link(3e-6, 1 / 150e9, ADDING_UP),
    "leaders": Link(1e-5, 1 / 25e9, ADDING_UP),
    "inter_node": Link(1e-5, 1 / 3e9, ADDING_UP),
    "all": Link(1e-5, 1 / 3e9, ADDING_UP),
}
Result = TypeVar("Result")


def run(rounds: int, json_file: Path | None) -> None:
    backward = made_up_backward(gradient_sizes(MODEL))
    report([measure(backward, num_nodes, ranks, rounds) for num_nodes, ranks in CLUSTERS], json_file)


def made_up_backward(sizes: list[int]) -> RecordedBackward:
    """Whose gradients are ready in proportion to the parameters that backward has come past."""
    ready_s = [BACKWARD_S * past / sum(sizes) for past in accumulate(sizes)]
    gradients = [Gradient(size * ELEMENT_BYTES["fp32"], "fp32") for size in sizes]
    return RecordedBackward([f"gradient {index}" for index in range(len(sizes))], gradients, ready_s)


def measure(backward: RecordedBackward, num_nodes: int, ranks_per_node: int, rounds: int) -> dict[str, Any]:
    topology = regular(num_nodes, ranks_per_node)
    plans = [plan for algorithm in ALGORITHMS.values() if (plan := algorithm(topology.shape, "bf16"))]
    tuning, choose_s = median_s(lambda: choose(backward, plans, topology, LINKS, bucket_mb=None), rounds)
    crossing, bytes_crossing_s = median_s(lambda: tuning.bytes_crossing, rounds)
    return {
        "model": MODEL,
        "nodes": num_nodes,
        "ranks": topology.num_ranks,
        "gradients": len(backward.gradients),
        "candidates": len(plans),
        "rounds": rounds,
        "choose_s": choose_s,
        "bytes_crossing_s": bytes_crossing_s,
        "buckets": len(tuning.buckets),
        "plans": tuning.algorithms,
        "median_mb_from_a_node": statistics.median(crossing) / 1e6,
    }


def median_s(call: Callable[[], Result], rounds: int) -> tuple[Result, float]:
    """What it returns, and the median of its seconds."""
    times_s = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        result = call()
        times_s.append(time.perf_counter() - started_s)
    return result, statistics.median(times_s)
