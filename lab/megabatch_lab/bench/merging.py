"""megabatch bench merging: the gain of merged buckets, each with its own plan, over one plan and one threshold.

The bench covers every preset, 8 to 2,048 ranks on several nodes, and the gradients of ResNet-50 and AlexNet-BN.  It
compares the simulated step with `merging.merge` to two others: the best single plan with the best of a dozen thresholds
(found by trying all of them, so better than any guess), and the best single plan with the usual 25 MB.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megabatch.simulate.cluster import Cluster
from megabatch.simulate.compute import compute_by_curve, default_precision
from megabatch.simulate.load import load_cluster, preset_names
from megabatch.simulate.step import AllReduceSettings, Compute, candidates, simulate_step
from megabatch.simulate.workload import load_workload
from megabatch_lab.bench.report import print_lines, write

RANKS = [8 << doubling for doubling in range(9)]
BATCHES = {"resnet50": 64, "alexnet_bn": 64}
THRESHOLDS_MB = [0, 0.25, 0.5, 1, 2, 4, 8, 16, 25, 32, 64, 1e9]
USUAL_MB = 25

Row = dict[str, Any]


def run(json_file: Path | None, presets: Iterable[str] | None = None) -> list[Row]:
    rows = [row for name in presets or preset_names() for row in compare(load_cluster(name))]
    print_lines([line(row) for row in rows])
    gains = sorted(row["gain"] for row in rows)
    above = sum(gain > 0.02 for gain in gains)
    print(
        f"\ngain over the best single plan and threshold: over 2% in {above} of {len(gains)}, at most {gains[-1]:.1%}"
    )
    write(rows, json_file)
    return rows


def compare(cluster: Cluster) -> list[Row]:
    rows = []
    for model, batch in BATCHES.items():
        compute = compute_by_curve(load_workload(model), cluster, default_precision(cluster), batch)
        for ranks in RANKS:
            if ranks > cluster.node.ranks:
                rows.append({"cluster": cluster.name, "model": model, "ranks": ranks} | gains(compute, cluster, ranks))
    return rows


def gains(compute: Compute, cluster: Cluster, ranks: int) -> Row:
    merged = simulate_step(compute, cluster, ranks, AllReduceSettings())
    groups = candidates(cluster, cluster.shape(ranks), AllReduceSettings())
    names = list(dict.fromkeys(plan.name.split("/")[0] for group in groups for plan in group))
    singles = {
        (name, threshold): simulate_step(
            compute, cluster, ranks, AllReduceSettings(algorithm=name, bucket_mb=threshold)
        )
        for name in names
        for threshold in THRESHOLDS_MB
    }
    # --algorithm flat includes the backend's plans, so its buckets may use several plans.
    single_plan = {key: step.total_s for key, step in singles.items() if len({b.plan for b in step.buckets}) == 1}
    (best_name, best_mb), best_s = min(single_plan.items(), key=lambda found: found[1])
    usual_s = min(step_s for (_, threshold), step_s in single_plan.items() if threshold == USUAL_MB)
    return {
        "step_s": merged.total_s,
        "plans": "+".join(dict.fromkeys(bucket.plan.name for bucket in merged.buckets)),
        "buckets": len(merged.buckets),
        "best_single": best_name,
        "best_threshold_mb": best_mb,
        "gain": best_s / merged.total_s - 1,
        "gain_over_25_mb": usual_s / merged.total_s - 1,
    }


def line(row: Row) -> dict[str, str]:
    threshold = row["best_threshold_mb"]
    return {
        "cluster": row["cluster"],
        "model": row["model"],
        "ranks": f"{row['ranks']:,}",
        "step ms": f"{1e3 * row['step_s']:.2f}",
        "merged": f"{row['plans']}, {row['buckets']}",
        "best single": f"{row['best_single']}, {'one bucket' if threshold > 1e6 else f'{threshold:g} MB'}",
        "gain": f"{row['gain']:.1%}",
        "over 25 MB": f"{row['gain_over_25_mb']:.1%}",
    }
