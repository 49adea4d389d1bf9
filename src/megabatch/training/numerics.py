"""How torch computes while a run lasts: products of fp32, cuDNN's choice of convolutions, deterministic algorithms.

All of this is global to a process, and `fit` runs in somebody else's; so what was set before is set again at the end.
"""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.config.loading import print_to_stderr
from megabatch.errors import UserError
from megabatch.precision.policy import PrecisionSettings
from megabatch.torch_api import (
    COMPILER_FILE,
    COMPILER_MODULES,
    NO_CXX,
    NO_TRITON,
    bucket_caps_bytes,
    cut_compiled_graphs,
)
from megabatch.training.parts import Parts

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # with others cuBLAS may add up in another order each time
REFUSAL = " does not have a deterministic implementation"  # of torch, after the name of an operation


def fix_workspace(deterministic: bool, device_type: str) -> None:
    """Before CUDA starts, if the run is to be deterministic: cuBLAS reads this once."""
    if not deterministic or device_type != "cuda":
        return
    if WORKSPACE not in os.environ and torch.cuda.is_initialized():
        raise UserError(
            f"run.deterministic=true: CUDA has started in this process without {WORKSPACE}; "
            f"start it with {WORKSPACE}={DETERMINISTIC_WORKSPACES[0]}"
        )
    found = os.environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if found not in DETERMINISTIC_WORKSPACES:
        raise UserError(
            f"run.deterministic=true, but {WORKSPACE}={found} is none of {', '.join(DETERMINISTIC_WORKSPACES)}, with "
            "which cuBLAS is deterministic; leave it out"
        )


@contextmanager
def arithmetic(precision: PrecisionSettings, deterministic: bool) -> Iterator[None]:
    """The flags that a run asks for, while it lasts.  They say nothing to a CPU, but for deterministic algorithms."""
    with (
        tf32(precision.formats.allows_tf32),
        chosen_convolutions(by_timing=not deterministic),
        deterministic_algorithms() if deterministic else nullcontext(),
    ):
        yield


@contextmanager
def tf32(is_allowed: bool) -> Iterator[None]:
    """By default torch multiplies matrices in fp32, and convolves in TF32.

    Both of torch's interfaces are set: with `fp32_precision` alone, the newer one, `allow_tf32` could not be read any
    more, and torch.backends.cudnn.flags, which some networks use, reads it.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    owners, operations = (matmul, cudnn), (matmul, cudnn.conv, cudnn.rnn)
    allowed = [read_allowed(owner) for owner in owners]
    precisions = [operation.fp32_precision for operation in operations]
    for owner in owners:
        owner.allow_tf32 = is_allowed
    for operation in operations:
        operation.fp32_precision = "tf32" if is_allowed else "ieee"
    try:
        yield
    finally:
        for owner, before in zip(owners, allowed, strict=True):
            if before is not None:
                owner.allow_tf32 = before
        for operation, precision in zip(operations, precisions, strict=True):
            operation.fp32_precision = precision


def read_allowed(owner: Any) -> bool | None:
    """None where the caller has set `fp32_precision` instead."""
    try:
        return bool(owner.allow_tf32)
    except RuntimeError:
        return None


@contextmanager
def chosen_convolutions(by_timing: bool) -> Iterator[None]:
    """Of cuDNN's algorithms: the fastest here and now, or by rule those that are deterministic."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = by_timing, not by_timing
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """An operation that has no deterministic form is refused, in one line."""
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except Exception as error:
        operation = refused_operation(error)
        if operation is None:
            raise
        raise UserError(
            f"run.deterministic=true: {operation} has no deterministic form in torch {torch.__version__}; "
            "use another layer for it, or leave run.deterministic out"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)


def refused_operation(error: BaseException | None) -> str | None:
    """What torch has refused since it is not deterministic; None for any other error."""
    while error is not None:
        operation, refusal, _ = str(error).partition(REFUSAL)
        if refusal:
            return operation.split()[-1]
        error = error.__cause__
    return None


# torch.compile of a run's network (`model.compile`).
#
# The network's forward is compiled in its place: state dicts keep their names, and DDP, which is not compiled, hands
# over gradients as before.  Inside DDP's forward pass torch cuts the graph where a bucket is full, so that backward
# still has gradients to hand over while it runs.  It would not cut a graph that it had compiled elsewhere; so
# backward is recorded before, and nothing but training runs what is compiled.  Evaluation does not: its last batch is
# smaller, and would be compiled once more, and `megabatch eval`, which compiles nothing, has to come to the same
# figures.

SMALLEST_CUT_BYTES = 1 << 20  # that torch makes


class CompiledInTraining:
    """A network's forward."""

    def __init__(self, network: nn.Module) -> None:
        self.plain = network.forward
        self.compiled = torch.compile(network.forward, dynamic=False)  # all microbatches have one size

    def __call__(self, *images: torch.Tensor) -> Any:
        return self.compiled(*images) if torch.is_grad_enabled() else self.plain(*images)


def compile_network(parts: Parts, distributed: DistributedDataParallel) -> None:
    """The first forward pass of `distributed` compiles it."""
    if parts.world.rank == 0:
        print_to_stderr("model.compile=true: compiling the network, which may take minutes")
    parts.network.forward = CompiledInTraining(parts.network)
    parts.statistics.move_outside(parts.network)
    # Buckets of ours differ in size, and torch would cut by the largest.
    cut_compiled_graphs(distributed, max(SMALLEST_CUT_BYTES, round(mean(bucket_caps_bytes(distributed)))))


def is_compiled(network: nn.Module) -> bool:
    return isinstance(network.forward, CompiledInTraining)


@contextmanager
def compile_errors() -> Iterator[None]:
    """Around the first pass of a network that has passed uncompiled: what the compiler refuses is one line."""
    try:
        yield
    except Exception as error:
        causes = compiler_errors(error)
        if not causes:
            raise
        names = [type(cause).__name__ for cause in causes]
        remedy = "leave model.compile out"
        if NO_CXX in names:
            remedy = f"install a C++ compiler such as g++ (or name one in CXX), or {remedy}"
        elif NO_TRITON in names:
            remedy = f"install triton, or {remedy}"
        said = next((line.strip() for line in str(causes[-1]).splitlines() if line.strip()), "")
        raise UserError(
            f"model.compile=true: torch cannot compile the network ({names[-1]}: {said}); {remedy}"
        ) from error


def compiler_errors(error: BaseException | None) -> list[BaseException]:
    """What torch.compile has raised, from the last to its first cause; nothing, if it was not that."""
    found: list[BaseException] = []
    while error is not None:
        if found or is_of_compiler(error):
            found.append(error)
        error = getattr(error, "inner_exception", None) or error.__cause__
    return found


def is_of_compiler(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return type(error).__module__.startswith(COMPILER_MODULES) or any(
        frame.f_code.co_filename.endswith(COMPILER_FILE) for frame, _ in frames
    )
