"""A description of the machine and software of a run (env.json)."""

import os
import platform
import shlex
import sys
from pathlib import Path

import torch

from megabatch import __version__
from megabatch.ranks.launch import COMMAND
from megabatch.ranks.machine import cpu_name, usable_cores
from megabatch.training.device import accelerator_names

# Variables that explain a run's speed or numerics.  An allow-list, because an environment also holds secrets.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "GLOO_SOCKET_IFNAME",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "WORLD_SIZE",
)


def describe_environment(num_ranks: int = 1, num_hosts: int = 1) -> dict[str, object]:
    return {
        "command": command_line(),
        "ranks": num_ranks,
        "hosts": num_hosts,
        "megabatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "cpu": cpu_name(),
        "cores": len(usable_cores()),
        "directory": str(Path.cwd()),  # relative paths in the recipe start here
        "gpus": accelerator_names(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def command_line() -> str | None:
    """Return the megabatch command that the user typed; None in a user's script."""
    given = os.environ.get(COMMAND)
    program = Path(sys.argv[0])
    # `megabatch` under srun and mpiexec, `python -m megabatch` under torchrun.
    if given is None and "megabatch" in (program.name, program.parent.name):
        given = shlex.join(["megabatch", *sys.argv[1:]])
    return given
