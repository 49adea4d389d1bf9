"""How a run of so many ranks is started."""

import shlex
from collections.abc import Sequence

from msgspec import Struct

USUAL_GPUS = 8  # of a host, where this one says nothing of the others
RENDEZVOUS = "--rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-id=my-run"


class Devices(Struct, frozen=True):
    """What this machine has for ranks."""

    kind: str  # cuda or cpu
    count: int  # GPUs, or cores

    def can_run(self, num_ranks: int) -> bool:
        return num_ranks <= self.count


def start_commands(arguments: Sequence[str], num_ranks: int, here: Devices) -> list[str]:
    """The lines to paste: here, or where there are as many GPUs, or on several hosts, on each of them.

    With GPUs here the other hosts are taken to have as many; without, HOSTS and GPUS are for the user to fill in.
    """
    train = f"megabatch train {shlex.join(arguments)}"
    alone = f"{train} --ranks {num_ranks}"
    if here.can_run(num_ranks):
        return [alone]
    per_host = here.count if here.kind == "cuda" else USUAL_GPUS
    fits_one = here.kind != "cuda" and num_ranks <= USUAL_GPUS
    if fits_one or num_ranks % per_host:
        sizes, where = "--nnodes=HOSTS --nproc-per-node=GPUS", f"on each host, HOSTS x GPUS = {num_ranks}"
    else:
        sizes = f"--nnodes={num_ranks // per_host} --nproc-per-node={per_host}"
        where = f"on each of {num_ranks // per_host} hosts"
    several = f"torchrun {sizes} {RENDEZVOUS} -m {train}  # {where}"
    return [f"{alone}  # on a host with {num_ranks} GPUs", several] if fits_one else [several]
