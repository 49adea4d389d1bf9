"""megabatch bench planning: how long the choice of buckets and plans takes for large clusters, without starting ranks.

ResNet-50's 161 fp32 gradients on 256 nodes of 8 ranks (2,048 ranks) and on 2,048 nodes (16,384 ranks).  The candidates
are flat, hierarchical and torus, with bf16 between nodes.  In a backward pass of 100 ms, gradients are ready in
proportion to the parameters so far.  The links are invented, typical of GPUs with one switch and one network card per
node.  The bench measures how fast such a cluster is planned, not how fast it is.
    axis         latency    bytes      reduction
    node           3 us     150 GB/s   600 GB/s
    leaders       10 us      25 GB/s   600 GB/s   one rank uses the card
    inter_node    10 us       3 GB/s   600 GB/s   the 8 ranks of a node share the card
    all           10 us       3 GB/s   600 GB/s
choose_s                median seconds of `choose`, which prices the plans, cuts the buckets and decides
bytes_crossing_s        median seconds of `Tuning.bytes_crossing`, which covers every node
median_mb_from_a_node   the result of `bytes_crossing` for the median node
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
CLUSTERS = ((256, 8), (2048, 8))  # nodes, ranks per node
REDUCTION_S_PER_BYTE = 1 / 600e9
LINKS: dict[Axis, Link] = {
    "node": Link(3e-6, 1 / 150e9, REDUCTION_S_PER_BYTE),
    "leaders": Link(1e-5, 1 / 25e9, REDUCTION_S_PER_BYTE),
    "inter_node": Link(1e-5, 1 / 3e9, REDUCTION_S_PER_BYTE),
    "all": Link(1e-5, 1 / 3e9, REDUCTION_S_PER_BYTE),
}
Result = TypeVar("Result")


def run(rounds: int, json_file: Path | None) -> None:
    backward = made_up_backward(gradient_sizes(MODEL))
    report([measure(backward, num_nodes, ranks, rounds) for num_nodes, ranks in CLUSTERS], json_file)


def made_up_backward(sizes: list[int]) -> RecordedBackward:
    """Return a backward pass whose gradients are ready in proportion to the parameters so far."""
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
    """Return the result of `call` and the median of its seconds."""
    times_s = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        result = call()
        times_s.append(time.perf_counter() - started_s)
    return result, statistics.median(times_s)
