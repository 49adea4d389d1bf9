"""Do all ranks have the same weights?  They compare sums of the bits of all that is the same on them by construction:
weights, BatchNorm's statistics, the optimizer's state.

Every rank takes the same update of the same sums from the same weights, so nothing ever makes them equal again once a
bit has flipped, or a hook has changed a weight, on one of them.  A flipped bit changes the sum of the int32 words of
its tensor.  Cost: one pass over the tensors, and 16 bytes over the network; where they differ, also a sum per tensor of
all ranks, most of which decide who is wrong.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from megabatch.errors import RanksDiffer
from megabatch.optim.momentum import in_memory_order
from megabatch.training.batch_norm import counter
from megabatch.training.parts import Parts

MOST_NAMED = 8  # ranks
WORDS = {1: torch.uint8, 2: torch.int16}  # by the bytes of an element; longer ones are several int32


def compare_ranks(run: Parts, done: int) -> None:
    """After so many steps; all ranks call it.  Raises on all of them if some differ."""
    if not run.comparison.every:
        return
    run.world.activity.begin("comparison of weights")
    sums = sums_of_bits(run)
    if run.world.first_difference(json.dumps(list(sums.values()))):
        of_ranks = run.world.all_gather(list(sums.values()), list[int])
        raise RanksDiffer(describe(list(sums), of_ranks, done, run.comparison.same_after))
    run.comparison.same_after = done


def sums_of_bits(run: Parts) -> dict[str, int]:
    names, sums = zip(*((name, sum_of_bits(tensor)) for name, tensor in same_tensors(run)), strict=True)
    return dict(zip(names, torch.stack(sums).tolist(), strict=True))


def same_tensors(run: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """What is the same on all ranks, on the device.  A buffer of one's own may differ: rank 0's is kept."""
    weights = run.master_weights.weights
    for name, parameter in run.network.named_parameters():
        yield name, weights.get(name, parameter)
    for name, module in zip(run.statistics.names, run.statistics.modules, strict=True):
        assert module.running_mean is not None and module.running_var is not None
        yield f"{name}.running_mean", module.running_mean
        yield f"{name}.running_var", module.running_var
        yield f"{name}.num_batches_tracked", counter(module)
    for name, weight in weights.items():
        for key, value in run.optimizer.state.get(weight, {}).items():
            if isinstance(value, torch.Tensor) and value.device == weight.device:
                yield f"{key} of {name}", value


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """An int32, which wraps around: on the CPU, sums in int64 of int32 take twenty times as long."""
    words = in_memory_order(tensor.detach()).reshape(-1).view(WORDS.get(tensor.element_size(), torch.int32))
    return words.sum(dtype=torch.int32)


def describe(names: Sequence[str], sums_of_ranks: Sequence[Sequence[int]], done: int, before: int) -> str:
    """`before`: after so many steps they were the same."""
    votes = Counter(map(tuple, sums_of_ranks))
    (agreed, most), *others = votes.most_common()
    is_majority = not others or most > others[0][1]
    right = agreed if is_majority else tuple(sums_of_ranks[0])
    wrong = [rank for rank, sums in enumerate(sums_of_ranks) if tuple(sums) != right]
    differing = [
        name for place, name in enumerate(names) if any(sums_of_ranks[rank][place] != right[place] for rank in wrong)
    ]
    whom, doubt = ("the others", "") if is_majority else ("rank 0", " (nothing says which is right)")
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    caution = f"; checkpoints after step {before} may have it" if 0 in wrong or not is_majority else ""
    return (
        f"{name_ranks(wrong)} from {whom} after step {done}, and not after step {before}: {differing[0]}{more}{doubt}; "
        "a fault of a memory or device, or a hook or optimizer of your own that does not do the same on all ranks; "
        f"start again, which resumes from the last checkpoint{caution}"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} differs"
    return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))}{' ...' * (len(ranks) > MOST_NAMED)} differ"
