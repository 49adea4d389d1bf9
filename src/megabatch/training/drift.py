"""Checks that all ranks have the same weights, BatchNorm statistics and optimizer state.

Every rank applies the same update to the same weights.  Once a bit flips or a hook changes a weight on one rank, the
ranks never become equal again.  Ranks compare checksums: the sum of the int32 words of each tensor, which any flipped
bit changes; small tensors share one.  Cost: one pass over the tensors and 16 bytes over the network.  If ranks differ,
they also exchange one checksum per tensor, and the majority decides which ranks are wrong.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from megabatch.errors import RanksDiffer
from megabatch.optim.momentum import in_memory_order
from megabatch.text import listed, name_ranks
from megabatch.training.batch_norm import counter
from megabatch.training.parts import Parts

SMALL = 1 << 14  # words; most tensors of a network are smaller
WORDS = {1: torch.uint8, 2: torch.int16}  # by bytes per element; longer elements are several int32


def compare_ranks(run: Parts, done: int) -> None:
    """Raise RanksDiffer on all ranks if some differ after `done` steps.  All ranks call it."""
    if not run.comparison.every:
        return
    run.world.activity.begin("comparison of weights")
    if run.world.first_difference(json.dumps(checksums(run))):
        sums = sums_of_bits(run)
        of_ranks = run.world.all_gather(list(sums.values()), list[int])
        raise RanksDiffer(describe_difference(list(sums), of_ranks, done, run.comparison.same_after))
    run.comparison.same_after = done


def checksums(run: Parts) -> list[int]:
    """Return the sums of large tensors, and of all small ones together: one each would be hundreds of launches."""
    sums, small = list[torch.Tensor](), dict[torch.dtype, list[torch.Tensor]]()
    for _, tensor in same_tensors(run):
        words = words_of(tensor)
        if words.numel() > SMALL:
            sums.append(words.sum(dtype=torch.int32))
        else:
            small.setdefault(words.dtype, []).append(words)
    sums += [torch.cat(each).sum(dtype=torch.int32) for each in small.values()]
    result: list[int] = torch.stack(sums).tolist()
    return result


def sums_of_bits(run: Parts) -> dict[str, int]:
    names, sums = zip(*((name, sum_of_bits(tensor)) for name, tensor in same_tensors(run)), strict=True)
    return dict(zip(names, torch.stack(sums).tolist(), strict=True))


def same_tensors(run: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the device tensors that must agree over ranks.  Custom buffers may differ: rank 0's are saved."""
    weights = run.master_weights.weights
    for name, parameter in run.network.named_parameters():
        yield name, weights.get(name, parameter)
    for name, module in zip(run.statistics.names, run.statistics.modules, strict=True):
        assert module.running_mean is not None and module.running_var is not None
        yield f"{name}.running_mean", module.running_mean
        yield f"{name}.running_var", module.running_var
        yield f"{name}.num_batches_tracked", counter(module)
    for name, average in run.average.tensors.items():
        yield f"average of {name}", average
    for name, weight in weights.items():
        for key, value in run.optimizer.state.get(weight, {}).items():
            if isinstance(value, torch.Tensor) and value.device == weight.device:
                yield f"{key} of {name}", value


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum in int32, with wrap-around: on a CPU, an int64 sum of int32 takes 20 times as long."""
    return words_of(tensor).sum(dtype=torch.int32)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    return in_memory_order(tensor.detach()).reshape(-1).view(WORDS.get(tensor.element_size(), torch.int32))


def describe_difference(names: Sequence[str], sums_of_ranks: Sequence[Sequence[int]], done: int, before: int) -> str:
    """Return the message for ranks that differ after `done` steps and were the same after `before`."""
    votes = Counter(map(tuple, sums_of_ranks))
    (agreed, most), *others = votes.most_common()
    is_majority = not others or most > others[0][1]
    right = agreed if is_majority else tuple(sums_of_ranks[0])
    wrong = [rank for rank, sums in enumerate(sums_of_ranks) if tuple(sums) != right]
    differing = [
        name for place, name in enumerate(names) if any(sums_of_ranks[rank][place] != right[place] for rank in wrong)
    ]
    whom, doubt = ("the others", "") if is_majority else ("rank 0", " (there is no majority)")
    verb = "differs" if len(wrong) == 1 else "differ"
    caution = f"; checkpoints after step {before} may contain the difference" if 0 in wrong or not is_majority else ""
    return (
        f"{name_ranks(wrong)} {verb} from {whom} after step {done}, and not after step {before}: "
        f"{listed(differing, 1)}{doubt}; a memory or device fault, or a custom hook or optimizer that depends on the "
        f"rank; start again to resume from the last checkpoint{caution}"
    )
