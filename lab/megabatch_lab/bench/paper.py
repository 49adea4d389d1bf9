"""The results of Jia et al. 2018 (arXiv 1807.11205), compared with the simulator on their cluster (p40-roce100).

A step is simulated as megabatch would run it.  "NCCL-based training" is read in two ways: one ring per tensor, as soon
as its gradient is ready, and rings over buckets of 64 MB, Horovod's default.  `needed` states the conditions for the
reported figure.
"""

from typing import NamedTuple

from megabatch.data.sources.shapes import IMAGENET
from megabatch.simulate.load import load_cluster
from megabatch.simulate.scenario import Scenario, Simulated, simulate
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import load_workload

CLUSTER = "p40-roce100"
RESNET_EPOCHS, ALEXNET_EPOCHS = 90, 95
NCCL = {"one ring per tensor": AllReduceSettings(algorithm="ring", overlap="layer")}
NCCL["rings over 64 MB"] = AllReduceSettings(algorithm="ring", overlap="fused", bucket_mb=64)


class Claim(NamedTuple):
    what: str
    reported: str
    predicted: str
    needed: str


def claims() -> list[Claim]:
    resnet = {ranks: run("resnet50", ranks, 65_536 // ranks) for ranks in (1024, 2048)}
    alexnet = run("alexnet_bn", 1024, 64)
    return [
        time_of("ResNet-50, 64K, 90 epochs, 2,048 GPUs", 6.6, resnet[2048], RESNET_EPOCHS),
        time_of("AlexNet-BN, 64K, 95 epochs, 1,024 GPUs", 4.0, alexnet, ALEXNET_EPOCHS),
        efficiency_of("1,024 GPUs, 64 images each", "~99 %", 0.99, resnet[1024]),
        efficiency_of("2,048 GPUs, 32 images each", "97 % or 87.9 %", 0.97, resnet[2048]),
        *(speedup("ResNet-50", 11.0, resnet[1024], name, all_reduce) for name, all_reduce in NCCL.items()),
        *(speedup("AlexNet-BN", 3.0, alexnet, name, all_reduce) for name, all_reduce in NCCL.items()),
    ]


def run(
    model: str, ranks: int, batch_per_rank: int, precision: str = "fp16", all_reduce: AllReduceSettings | None = None
) -> Simulated:
    return simulate(
        Scenario(
            workload=load_workload(model),
            cluster=load_cluster(CLUSTER),
            num_ranks=ranks,
            batch_per_rank=batch_per_rank,
            precision=precision,
            all_reduce=all_reduce or AllReduceSettings(),
        )
    )


def time_of(what: str, reported_minutes: float, simulated: Simulated, epochs: int) -> Claim:
    images, ranks = epochs * IMAGENET.num_train, simulated.scenario.num_ranks
    low, high = (images / rate / 60 for rate in (simulated.high_images_per_s, simulated.low_images_per_s))
    reported_rate = images / (60 * reported_minutes) / ranks
    return Claim(
        f"time: {what}",
        f"{reported_minutes:g} min",
        f"{images / simulated.images_per_s / 60:.1f} min ({low:.1f} to {high:.1f}), steps only",
        f"{reported_rate:,.0f} images/s per GPU over the whole run; steps only reach "
        f"{simulated.images_per_s / ranks:,.0f}: {60 * reported_minutes - images / simulated.images_per_s:,.0f} s of "
        "start, input, evaluation and checkpoints",
    )


def efficiency_of(what: str, reported: str, wanted: float, simulated: Simulated) -> Claim:
    step = simulated.step
    allowed_ms = 1e3 * step.computing_s * (1 / wanted - 1)
    lost_ms = 1e3 * (step.exposed_s + step.jitter_s)
    return Claim(
        f"efficiency: {what}",
        reported,
        f"{100 * simulated.efficiency:.1f} %",
        f"{allowed_ms:.1f} ms of waiting per step for {100 * wanted:.0f} %; simulated: {lost_ms:.1f} ms, "
        f"of which {1e3 * step.exposed_s:.1f} of all-reduce and {1e3 * step.jitter_s:.1f} for the slowest rank",
    )


def speedup(name: str, reported: float, ours: Simulated, how: str, all_reduce: AllReduceSettings) -> Claim:
    scenario = ours.scenario
    # The baseline also computes in 16 bits, with fp32 gradients.
    theirs = run(scenario.workload.model, scenario.num_ranks, scenario.batch_per_rank, "amp", all_reduce)
    return Claim(
        f"speed-up over NCCL at 1,024 GPUs: {name}, {how}",
        f"up to {reported:g}x",
        f"{theirs.step.total_s / ours.step.total_s:.1f}x",
        f"a baseline at {100 * ours.efficiency / reported:.0f} % efficiency; simulated: "
        f"{100 * theirs.efficiency:.0f} %",
    )
