"""The compute time of a rank: from a device's curve and the FLOPs of a workload, or from a recorded profile."""

import math

from megabatch.errors import UserError
from megabatch.planning.pipeline import GradientDtype
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.device import DEVIATIONS, Curve, FittedCurve, fit_curve
from megabatch.simulate.profile import Profile
from megabatch.simulate.step import Compute
from megabatch.simulate.workload import Workload, load_workload, timed_backward

GRADIENTS: dict[str, GradientDtype] = {
    "fp32": "fp32",
    "tf32": "fp32",
    "fp64": "fp64",
    "fp16": "fp16",
    "bf16": "bf16",
    "amp": "fp32",
    "amp-bf16": "fp32",
}
CURVES = {"amp": "fp16", "amp-bf16": "bf16"}  # autocast computes in 16 bits
OPTIMIZER_BYTES = {"fp16": 16, "bf16": 16}  # per parameter: weight, gradient, fp32 copies of both, momentum
OPTIMIZER_BYTES_FP32 = 12


def default_precision(cluster: Cluster) -> str:
    """Return a 16-bit precision if the cluster has a curve for it, or else its first precision."""
    curves = cluster.device.curves
    return next((name for name in ("fp16", "bf16") if name in curves), next(iter(curves)))


def find_curve(cluster: Cluster, precision: str, model: str) -> Curve:
    """Return the curve of the model, or else of ResNet-50, or else the first."""
    curves = cluster.device.curves.get(CURVES.get(precision, precision))
    if not curves:
        known = ", ".join(cluster.device.curves)
        raise UserError(
            f"precision.name={precision!r}: {cluster.name} has the throughput of {cluster.device.name} only in "
            f"{known}; nearest: precision.name={default_precision(cluster)}"
        )
    by_model = {curve.model: curve for curve in curves}
    return by_model.get(model.removesuffix("_bn")) or by_model.get("resnet50") or curves[0]


def fit_device(cluster: Cluster, precision: str, workload: Workload) -> FittedCurve:
    """Return the curve of forward and backward time of one microbatch."""
    curve = find_curve(cluster, precision, workload.model)
    fitted = fit_curve(curve, cluster.device.variant)
    measured = load_workload(curve.model)
    flops, flops_measured = (w.forward_flops + w.backward_flops for w in (workload, measured))
    # Launches scale with layers, the rest with FLOPs.
    return fitted.times(len(workload.layers) / len(measured.layers), flops / flops_measured)


def compute_by_curve(
    workload: Workload, cluster: Cluster, precision: str, microbatch: float, accumulation: int = 1
) -> Compute:
    fitted = fit_device(cluster, precision, workload)
    seconds = fitted.line.seconds(microbatch)
    backward_share = workload.backward_flops / (workload.forward_flops + workload.backward_flops)
    backward_s = backward_share * seconds
    fixed_s = backward_share * fitted.line.fixed_s
    return Compute(
        forward_s=seconds - backward_s,
        backward=timed_backward(workload, backward_s, fixed_s, GRADIENTS[precision]),
        backward_s=backward_s,
        num_images=accumulation * microbatch,
        accumulation=accumulation,
        uncertainty=math.hypot(DEVIATIONS * fitted.spread, fitted.doubt(microbatch)),
    )


def compute_by_profile(profile: Profile, microbatch: float, accumulation: int = 1) -> Compute:
    return Compute(
        forward_s=profile.forward_s(microbatch),
        backward=profile.backward(microbatch),
        backward_s=profile.backward_s(microbatch),
        num_images=accumulation * microbatch,
        accumulation=accumulation,
        update_s=profile.update_s,
    )


def memory_bytes(workload: Workload, precision: str, microbatch: float) -> float:
    """Return the memory of one rank, without the data set and the framework."""
    num_bytes = 2 if precision in ("fp16", "bf16", "amp", "amp-bf16") else 8 if precision == "fp64" else 4
    per_parameter = OPTIMIZER_BYTES.get(precision, OPTIMIZER_BYTES_FP32 * (2 if precision == "fp64" else 1))
    return workload.num_parameters * per_parameter + microbatch * workload.activation_bytes(num_bytes)


def require_memory(workload: Workload, cluster: Cluster, precision: str, microbatch: int) -> None:
    needed, available = memory_bytes(workload, precision, microbatch), cluster.device.memory_gb * 1e9
    if needed > available:
        fixed = memory_bytes(workload, precision, 0)
        fitting = int(max(0.0, available - fixed) / (needed - fixed) * microbatch)
        remedy = f"nearest: {fitting} images per microbatch" if fitting else "no batch fits"
        raise UserError(
            f"{microbatch} images of {workload.model} in {precision} need {needed / 1e9:,.1f} GB, but "
            f"{cluster.device.name} has {cluster.device.memory_gb:g}; {remedy}"
        )
