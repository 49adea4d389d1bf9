"""How a run of so many ranks is started."""

import shlex
from collections.abc import Sequence

from msgspec import Struct

USUAL_GPUS = 8  # of a host, where this one says nothing of the others
# Not --rdzv-backend=c10d, nor --standalone, which takes it: they unpickle what they find at a port.
RENDEZVOUS = "--node-rank=I --master-addr=HOST --master-port=29400"


class Devices(Struct, frozen=True):
    """What this machine has for ranks."""

    kind: str  # cuda or cpu
    count: int  # GPUs, or cores
    is_telling: bool  # of other hosts: not if it merely has no GPU, where the run may be planned and not made

    def can_run(self, num_ranks: int) -> bool:
        return num_ranks <= self.count

    def kind_for(self, num_ranks: int) -> str:
        """What so many ranks would run on."""
        return self.kind if self.is_telling or self.can_run(num_ranks) else "cuda"


def start_commands(arguments: Sequence[str], num_ranks: int, here: Devices) -> list[str]:
    """The lines to paste: here, or where there are as many GPUs, or on several hosts, on each of them.

    Other hosts are taken to be as this one if that is telling; else, up to a usual host, the user fills in how many.
    """
    train = f"megabatch train {shlex.join(arguments)}"
    alone = f"{train} --ranks {num_ranks}"
    if here.can_run(num_ranks):
        return [alone]
    per_host = here.count if here.is_telling else USUAL_GPUS
    fits_one = not here.is_telling and num_ranks <= USUAL_GPUS
    if fits_one or num_ranks % per_host:
        sizes, where = "--nnodes=HOSTS --nproc-per-node=GPUS", f"on each host I = 0, 1, ..., HOSTS x GPUS = {num_ranks}"
    else:
        sizes = f"--nnodes={num_ranks // per_host} --nproc-per-node={per_host}"
        where = f"on each of {num_ranks // per_host} hosts, I = 0, 1, ..."
    several = f"torchrun {sizes} {RENDEZVOUS} -m {train}  # {where}"
    return [f"{alone}  # on a host with {num_ranks} GPUs", several] if fits_one else [several]
