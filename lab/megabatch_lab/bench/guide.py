"""Tables for docs/scaling.md: simulated clusters of 8 to 16,384 ranks, and the gain of the paper's improvements."""

from megabatch.data.sources.shapes import IMAGENET
from megabatch.simulate.compute import default_precision
from megabatch.simulate.job import Job
from megabatch.simulate.load import load_cluster
from megabatch.simulate.scenario import Simulated, simulate
from megabatch.simulate.whatif import ladder, losses
from megabatch.simulate.workload import load_workload

CLUSTERS = ("dgx-h100", "dgx-a100", "dgx1-v100", "p40-roce100", "aws-p3-25gbe", "hkbu-10gbe")
RANKS = (8, 64, 512, 2_048, 16_384)
LADDER_CLUSTERS, LADDER_RANKS = ("p40-roce100", "hkbu-10gbe", "dgx-a100"), 1_024
BATCH = 64

Line = dict[str, str]


def guide_tables() -> dict[str, list[Line]]:
    return {
        "expect": [expect_line(name, ranks) for ranks in RANKS for name in CLUSTERS],
        "ladder": [
            line for name in LADDER_CLUSTERS for model in ("resnet50", "alexnet_bn") for line in climb(name, model)
        ],
    }


def job(model: str, precision: str) -> Job:
    return Job(
        name=model,
        workload=load_workload(model),
        precision=precision,
        batch_per_rank=BATCH,
        num_train=IMAGENET.num_train,
        num_test=0,
    )


def expect_line(name: str, ranks: int) -> Line:
    cluster = load_cluster(name)
    found = simulate(job("resnet50", default_precision(cluster)).scenario(cluster, ranks))
    return {
        "GPUs": f"{ranks:,}",
        "cluster": name,
        "images/s": f"{found.images_per_s:,.0f}",
        "efficiency": f"{found.efficiency:.1%}",
        "largest loss": largest_loss(found),
        "plan": found.plan,
    }


def largest_loss(found: Simulated) -> str:
    lost = losses(found)
    shares = {"latency": lost.latency, "bandwidth": lost.carrying, "jitter": lost.jitter}
    name, share = max(shares.items(), key=lambda item: item[1])
    return f"{name}, {share:.1%}" if share >= 0.001 else "-"


def climb(name: str, model: str) -> list[Line]:
    cluster = load_cluster(name)
    variants = ladder(job(model, default_precision(cluster)), cluster, [LADDER_RANKS])
    steps = [variant.results[0] for variant in variants]
    return [
        {
            "cluster": name,
            "model": model,
            "improvement": variant.label,
            "step ms": f"{1e3 * found.step.total_s:,.1f}",
            "efficiency": f"{found.efficiency:.1%}",
            "faster than before": f"{before.step.total_s / found.step.total_s:.2f}x",
            "than the first": f"{steps[0].step.total_s / found.step.total_s:.2f}x",
            "plan": found.plan,
        }
        for variant, before, found in zip(variants, [steps[0], *steps], steps, strict=False)
    ]
