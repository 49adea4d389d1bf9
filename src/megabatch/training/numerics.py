"""Torch's numerics flags during a run (TF32, cuDNN's algorithms, determinism) and the compilation of its network.

The flags are global to a process.  `fit` runs in the caller's process, so they are restored when the run ends.
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
    nondeterministic_operation,
    split_compiled_graphs,
)
from megabatch.training.parts import Parts

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # with other values cuBLAS may sum in a different order each time


def set_cublas_workspace(deterministic: bool, device_type: str) -> None:
    """Set the cuBLAS workspace for a deterministic run.  Call it before CUDA starts: cuBLAS reads the variable once."""
    if not deterministic or device_type != "cuda":
        return
    if WORKSPACE not in os.environ and torch.cuda.is_initialized():
        raise UserError(
            f"run.deterministic=true: CUDA started in this process without {WORKSPACE}; "
            f"set {WORKSPACE}={DETERMINISTIC_WORKSPACES[0]} before the process starts"
        )
    found = os.environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if found not in DETERMINISTIC_WORKSPACES:
        raise UserError(
            f"run.deterministic=true, but cuBLAS is deterministic only with {WORKSPACE}="
            f"{' or '.join(DETERMINISTIC_WORKSPACES)}, not {found}; unset it"
        )


@contextmanager
def arithmetic(precision: PrecisionSettings, deterministic: bool) -> Iterator[None]:
    """Set the flags of a run while the context lasts.  On a CPU only deterministic algorithms have an effect."""
    with (
        tf32(precision.formats.allows_tf32),
        cudnn_flags(benchmark=not deterministic),
        deterministic_algorithms() if deterministic else nullcontext(),
    ):
        yield


@contextmanager
def tf32(is_allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32.  Torch's default is fp32 for matrix products and TF32 for convolutions.

    Both of torch's interfaces are set.  If only the newer `fp32_precision` were set, reading `allow_tf32` would raise,
    and torch.backends.cudnn.flags, which some networks use, reads it.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    owners, operations = (matmul, cudnn), (matmul, cudnn.conv, cudnn.rnn)
    allowed = [read_allow_tf32(owner) for owner in owners]
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


def read_allow_tf32(owner: Any) -> bool | None:
    """Return the flag; None if the caller set `fp32_precision` instead."""
    try:
        return bool(owner.allow_tf32)
    except RuntimeError:
        return None


@contextmanager
def cudnn_flags(benchmark: bool) -> Iterator[None]:
    """Let cuDNN choose the fastest algorithm by timing, or only deterministic algorithms."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = benchmark, not benchmark
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Raise a one-line UserError for an operation that has no deterministic implementation."""
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except Exception as error:
        operation = nondeterministic_operation(error)
        if operation is None:
            raise
        raise UserError(
            f"run.deterministic=true: {operation} has no deterministic implementation in torch "
            f"{torch.__version__}; replace the layer that uses it, or omit run.deterministic"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)


# torch.compile of a run's network (`model.compile`).
#
# The network's forward is replaced by the compiled one, so that state dicts keep their names.  DDP is not compiled and
# all-reduces gradients as before.  Inside DDP's forward pass torch splits the graph at bucket boundaries, so that
# gradients become ready during backward.  It does not split a graph that was compiled outside DDP: so backward is
# recorded before compilation, and only training uses the compiled forward.  Evaluation does not, because its smaller
# last batch would be compiled again, and because `megabatch eval`, which does not compile, must compute the same
# figures.

SMALLEST_CUT_BYTES = 1 << 20  # torch's smallest graph split


class CompiledInTraining:
    """A network's forward: compiled in training, eager otherwise."""

    def __init__(self, network: nn.Module) -> None:
        self.eager = network.forward
        self.compiled = torch.compile(network.forward, dynamic=False)  # all microbatches have one size

    def __call__(self, *images: torch.Tensor) -> Any:
        return self.compiled(*images) if torch.is_grad_enabled() else self.eager(*images)


def compile_network(parts: Parts, distributed: DistributedDataParallel) -> None:
    """Compile the network in the next forward pass of `distributed`."""
    if parts.world.rank == 0:
        print_to_stderr("model.compile=true: compiling the network, which may take minutes")
    parts.network.forward = CompiledInTraining(parts.network)
    parts.statistics.update_outside_graph(parts.network)
    # Our buckets differ in size, and torch would split by the largest.
    split_compiled_graphs(distributed, max(SMALLEST_CUT_BYTES, round(mean(bucket_caps_bytes(distributed)))))


def is_compiled(network: nn.Module) -> bool:
    return isinstance(network.forward, CompiledInTraining)


@contextmanager
def compile_errors() -> Iterator[None]:
    """Raise a one-line UserError if compilation fails.  Wraps the first compiled pass of a network that ran eagerly."""
    try:
        yield
    except Exception as error:
        causes = compiler_errors(error)
        if not causes:
            raise
        names = [type(cause).__name__ for cause in causes]
        remedy = "omit model.compile"
        if NO_CXX in names:
            remedy = f"install a C++ compiler such as g++ (or set CXX), or {remedy}"
        elif NO_TRITON in names:
            remedy = f"install triton, or {remedy}"
        reason = next((line.strip() for line in str(causes[-1]).splitlines() if line.strip()), "")
        raise UserError(
            f"model.compile=true: torch cannot compile the network ({names[-1]}: {reason}); {remedy}"
        ) from error


def compiler_errors(error: BaseException | None) -> list[BaseException]:
    """Return the errors from torch.compile, from the last to its first cause; empty if none came from it."""
    found: list[BaseException] = []
    while error is not None:
        if found or is_compiler_error(error):
            found.append(error)
        error = getattr(error, "inner_exception", None) or error.__cause__
    return found


def is_compiler_error(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return type(error).__module__.startswith(COMPILER_MODULES) or any(
        frame.f_code.co_filename.endswith(COMPILER_FILE) for frame, _ in frames
    )
