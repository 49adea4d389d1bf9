"""torch.compile of a run's network (`model.compile`).

The network's forward is compiled in its place: state dicts keep their names, and DDP, which is not compiled, hands over
gradients as before.  Inside DDP's forward pass torch cuts the graph where a bucket is full, so that backward still has
gradients to hand over while it runs.  It would not cut a graph that it had compiled elsewhere; so backward is recorded
before, and nothing but training runs what is compiled.  Evaluation does not: its last batch is smaller, and would be
compiled once more, and `megabatch eval`, which compiles nothing, has to come to the same figures.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.config.loading import print_to_stderr
from megabatch.errors import UserError
from megabatch.torch_api import (
    COMPILER_FILE,
    COMPILER_MODULES,
    NO_CXX,
    NO_TRITON,
    bucket_caps_bytes,
    cut_compiled_graphs,
)
from megabatch.train.parts import Parts

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
