"""megabatch bench optimizer: one step of LARS, compared with other implementations, and of the other optimizers.

Every arm has the weights, gradients, parameter groups and settings of the same network.  Biases and normalisation
layers have no decay and no trust ratio.  Arms take turns, with a rotated order every round.  The gradients are written
before each step, outside the measured time, as a backward pass would (some peers also modify them).  A step's time is
the median over rounds.  A ratio is the median of ratios within a round, because the machine's speed varies over time.
ours        LARS as `megabatch train` builds it (you2017: the learning rate inside the momentum)
peers       LARS of pytorch_optimizer, per tensor and with foreach, and Lars of timm.  Both apply the learning rate
            outside the momentum.  `peer` names the fastest, and `peer_lars_s` is its time
sgd_fused   torch.optim.SGD(fused=True) with momentum: the cost of a step without trust ratios
checked     ours and sgd_fused after the norm of the whole gradient, by which `megabatch train` detects inf and NaN:
            LARS reuses these norms in its step, SGD cannot
others      adamw, lamb and muon as `megabatch train` builds them.  muon takes a few rounds only, and is left out for
            AlexNet, whose step takes a minute
limit       4 bytes x (7 per weight with a trust ratio: w and g read for the norms, w, g, v read and w, v written; 5 per
            other weight), divided by the bandwidth of torch.add(a, b, out=a), which reads two tensors and writes one,
            on 64 MiB each, with the same threads, in the same rounds.  Weights that stay in the cache between norms and
            update can be faster than this.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.config.loading import load_config, silent
from megabatch.config.resolve import plan_groups
from megabatch.models.catalog import ModelSettings, build_model
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lars import LARS
from megabatch.optim.optimizers import OPTIMIZERS, OptimSettings, gradient_norm, make_optimizer
from megabatch.ranks.machine import usable_cores
from megabatch.torch_api import allow_torchvision_without_extension
from megabatch_lab.bench.report import in_turns, report

NETWORKS = ("resnet50", "alexnet")
OTHERS = ("adamw", "lamb", "muon")
OUR_ARMS = ("ours", "ours_checked", "sgd_fused", "sgd_checked", *OTHERS)
MUON_ROUNDS = 3
WITHOUT_MUON = ("alexnet",)  # a step takes 6e12 operations
LEARNING_RATE, MOMENTUM, DECAY, TRUST_COEFFICIENT = 0.1, 0.9, 5e-5, 0.001
BANDWIDTH_BYTES = 64 << 20

Groups = list[dict[str, Any]]
Arm = Callable[[], object]


def run(networks: Sequence[str], rounds: int, json_file: Path | None) -> None:
    threads_before = torch.get_num_threads()
    rows = []
    try:
        for name in networks:
            for threads in sorted({1, len(usable_cores())}):
                torch.set_num_threads(threads)
                rows.append(measure(name, threads, rounds))
    finally:
        torch.set_num_threads(threads_before)
    report(rows, json_file)
    if any(row["pytorch_optimizer_s"] is None or row["timm_s"] is None for row in rows):
        print("some peers are not installed and were left out; `make .venv/installed-dev` installs them")


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    with torch.device("meta"):
        network = build_model(ModelSettings(name=name), seed=1, num_classes=1000, in_channels=3, image_size=224)
    groups = parameter_groups(network, DECAY)
    source = {parameter.shape: random_like(parameter) for parameter in parameters_of(groups)}
    arms: dict[str, torch.optim.Optimizer] = {
        "ours": OPTIMIZERS["lars"](
            copies(groups),
            OptimSettings(
                name="lars",
                learning_rate=LEARNING_RATE,
                momentum=MOMENTUM,
                weight_decay=DECAY,
                trust_coefficient=TRUST_COEFFICIENT,
            ),
        ),
        "sgd_fused": torch.optim.SGD(copies(groups), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True),
        **peers(groups),
        **{other: make_other(other, name, network) for other in OTHERS if other != "muon" or name not in WITHOUT_MUON},
    }
    moved = [torch.ones(BANDWIDTH_BYTES // 4) for _ in range(2)]
    steps: dict[str, Arm] = {arm: optimizer.step for arm, optimizer in arms.items()}
    for arm, of in (("ours_checked", "ours"), ("sgd_checked", "sgd_fused")):
        arms[arm], steps[arm] = arms[of], partial(step_checked, arms[of])
    times: dict[str, list[float]] = {arm: [] for arm in (*arms, "bandwidth")}
    for arm, is_counted in in_turns(times, rounds, warm_up=2):  # the warm-up creates the momentum buffers
        if arm == "muon" and len(times[arm]) == MUON_ROUNDS:
            continue
        if arm == "bandwidth":
            took_s = time_call(lambda: torch.add(moved[0], moved[1], out=moved[0]))
        else:
            write_gradients(arms[arm], source)
            took_s = time_call(steps[arm])
        if is_counted:
            times[arm].append(took_s)
    return describe_variant(name, threads, rounds, groups, times)


def describe_variant(
    name: str, threads: int, rounds: int, groups: Groups, times: dict[str, list[float]]
) -> dict[str, Any]:
    seconds = {arm: statistics.median(taken) for arm, taken in times.items()}
    peer_arms = [arm for arm in times if arm not in (*OUR_ARMS, "bandwidth")]
    peer = min(peer_arms, key=seconds.__getitem__, default=None)
    bytes_per_s = 3 * BANDWIDTH_BYTES / seconds["bandwidth"]
    num_bytes = sum(
        (7 if group["trust_ratio"] else 5) * 4 * parameter.numel() for group in groups for parameter in group["params"]
    )
    return {
        "model": name,
        "threads": threads,
        "parameters": sum(parameter.numel() for parameter in parameters_of(groups)),
        "rounds": rounds,
        "ours_s": seconds["ours"],
        "peer_lars_s": seconds[peer] if peer else None,
        "peer": peer,
        "sgd_fused_s": seconds["sgd_fused"],
        "limit_s": num_bytes / bytes_per_s,
        "ratio_to_peer": median_ratio(times[peer], times["ours"]) if peer else None,
        "ratio_to_sgd": median_ratio(times["ours"], times["sgd_fused"]),
        "ours_checked_s": seconds["ours_checked"],
        "sgd_checked_s": seconds["sgd_checked"],
        "bandwidth_gb_per_s": bytes_per_s / 1e9,
        **{f"{arm}_s": seconds.get(arm) for arm in ("pytorch_optimizer", "pytorch_optimizer_foreach", "timm", *OTHERS)},
    }


def make_other(name: str, network_name: str, network: nn.Module) -> torch.optim.Optimizer:
    settings = [f"model.name={network_name}", f"optim.name={name}", f"optim.weight_decay={DECAY}"]
    config = load_config("smoke", settings, report=silent)
    return make_optimizer(copies(plan_groups(config, network)), config.optim)


def peers(groups: Groups) -> dict[str, torch.optim.Optimizer]:
    """Return the peers that are installed."""
    found: dict[str, torch.optim.Optimizer] = {}
    pytorch_optimizer = import_or_none("pytorch_optimizer")
    if pytorch_optimizer:  # it skips one-dimensional parameters: the same ones in these networks
        for arm, foreach in (("pytorch_optimizer", False), ("pytorch_optimizer_foreach", True)):
            found[arm] = pytorch_optimizer.LARS(
                copies(groups),
                lr=LEARNING_RATE,
                momentum=MOMENTUM,
                trust_coefficient=TRUST_COEFFICIENT,
                foreach=foreach,
            )
    allow_torchvision_without_extension()  # timm imports it
    timm = import_or_none("timm.optim")
    if timm:  # it skips parameters without decay
        found["timm"] = timm.Lars(
            copies(groups), lr=LEARNING_RATE, momentum=MOMENTUM, trust_coeff=TRUST_COEFFICIENT, eps=0.0
        )
    return found


def import_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def copies(groups: Groups) -> Groups:
    """Return the groups with copies of the weights, which are the same in every arm."""
    return [group | {"params": [nn.Parameter(random_like(each)) for each in group["params"]]} for group in groups]


def step_checked(optimizer: torch.optim.Optimizer) -> None:
    optimizer.gradient_norm() if isinstance(optimizer, LARS) else gradient_norm(optimizer)
    optimizer.step()


def random_like(parameter: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(parameter.numel())
    return torch.randn(parameter.shape, generator=generator).mul_(0.02)


def parameters_of(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def write_gradients(optimizer: torch.optim.Optimizer, source: Mapping[torch.Size, Tensor]) -> None:
    for parameter in parameters_of(optimizer.param_groups):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(source[parameter.shape])


def time_call(call: Arm) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))
