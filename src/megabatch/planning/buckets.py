"""Tensor fusion: which gradients travel together.

Gradients come in the order in which backward produces them: the reverse of registration, until a first backward
has shown the true order.  A bucket holds gradients of one dtype, takes them while it stays within the threshold,
and a gradient above the threshold goes alone.  (Few large buckets waste less latency; many small ones start sooner,
under the rest of backward.)
"""

from collections.abc import Sequence
from itertools import zip_longest

from megabatch.planning.backward import Gradient

MIB = 2**20


def fuse(gradients: Sequence[Gradient], threshold_bytes: int) -> list[list[int]]:
    """Indices of the gradients of each bucket; buckets in the order in which they become complete."""
    buckets: list[list[int]] = []
    latest: dict[str, list[int]] = {}  # the bucket that each dtype is filling
    room: dict[str, int] = {}
    for index, (num_bytes, dtype) in enumerate(gradients):
        if dtype not in latest or num_bytes > room[dtype]:
            latest[dtype], room[dtype] = [], threshold_bytes
            buckets.append(latest[dtype])
        latest[dtype].append(index)
        room[dtype] -= num_bytes
    return sorted(buckets, key=lambda bucket: bucket[-1])


def ddp_caps(gradients: Sequence[Gradient], buckets: Sequence[Sequence[int]]) -> list[float] | None:
    """The `bucket_cap_mb_list` with which DistributedDataParallel makes exactly these buckets, or None.

    DDP makes them when it rebuilds its buckets after the first backward, so from the second on; never, when it
    looks for unused parameters in a graph that is not static.  None: every dtype walks the same list from its start,
    so several dtypes whose n-th buckets differ much have no common list (give DDP one `bucket_cap_mb` then), nor has
    a bucket that ends with an empty tensor.
    """
    sizes: dict[str, list[int]] = {}
    for bucket in buckets:
        size = sum(gradients[index].num_bytes for index in bucket)
        sizes.setdefault(gradients[bucket[0]].dtype, []).append(size)
    # The n-th cap must be reached by every dtype with a bucket after its n-th; a dtype's last bucket may stay open.
    reached = zip_longest(*(of_dtype[:-1] for of_dtype in sizes.values()))
    caps = [min(size for size in nth if size is not None) for nth in reached]
    caps.append(max(of_dtype[-1] for of_dtype in sizes.values()))
    if sorted(ddp_buckets(gradients, caps)) != sorted(map(list, buckets)):
        return None
    # Exact: a division by a power of two loses no bit, and DDP multiplies by the same.
    return [cap / MIB for cap in caps]


def ddp_buckets(gradients: Sequence[Gradient], caps_bytes: Sequence[int]) -> list[list[int]]:
    """DDP's own rule: a bucket closes when it reaches its cap; the n-th of a dtype has the n-th cap, or the last."""
    closed: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    num_closed: dict[str, int] = {}
    for index, (_, dtype) in enumerate(gradients):
        bucket = latest.setdefault(dtype, [])
        bucket.append(index)
        nth = num_closed.get(dtype, 0)
        if sum(gradients[i].num_bytes for i in bucket) >= caps_bytes[min(nth, len(caps_bytes) - 1)]:
            closed.append(latest.pop(dtype))
            num_closed[dtype] = nth + 1
    return closed + list(latest.values())
