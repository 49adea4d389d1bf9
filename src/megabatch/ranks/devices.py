"""Which of the devices that a process sees is its own."""

from megabatch.errors import UserError


def choose_index(local_rank: int, num_local_ranks: int, num_visible: int) -> int:
    """Launchers let every rank see all devices of its host, or one of its own (srun --gpus-per-task=1)."""
    if num_visible == 1:
        return 0
    if num_local_ranks > num_visible:
        raise UserError(
            f"{num_local_ranks} ranks on this host see {num_visible} devices, and each needs one of its own; "
            f"nearest: {num_visible} ranks on a host"
        )
    return local_rank % num_visible
