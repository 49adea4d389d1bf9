"""The division of a step's samples among ranks.

Legend: G samples in the global batch, m in a microbatch, R ranks; G = m x accumulation x R.

Step s takes positions [s*G, (s+1)*G) of one endless stream of samples, cut into G/m microbatches.  Rank r takes
`accumulation` consecutive microbatches.  The contents of a microbatch depend only on s and its index, so the same run
can be divided among any number of ranks.
"""

import math
from typing import Annotated

from msgspec import Meta, Struct, field

from megabatch.errors import UserError

Count = Annotated[int, Meta(ge=1, le=2**30)]  # samples; the largest published batch is a thousand times smaller


class BatchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    global_batch: Count = field(name="global")
    microbatch: Count = field(name="micro")  # the samples that one BatchNorm sees

    def __post_init__(self) -> None:
        if self.global_batch % self.microbatch:
            below = self.global_batch // self.microbatch * self.microbatch
            choices = [size for size in (below, below + self.microbatch) if size]
            closest = min(choices, key=lambda size: abs(size - self.global_batch))
            raise UserError(
                f"batch.global={self.global_batch} is not a whole number of microbatches of {self.microbatch}; "
                f"nearest: batch.global={closest}"
            )

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.microbatch


class StepPlan(Struct, frozen=True, kw_only=True):
    """The division of every step of a run among its ranks."""

    global_batch: int
    microbatch: int
    num_ranks: int
    num_samples: int  # in one epoch
    num_steps: int
    evaluate_every: int = 1  # epochs; 0: only after the last step

    @property
    def accumulation(self) -> int:
        """Microbatches per rank and step."""
        return self.global_batch // (self.microbatch * self.num_ranks)

    def microbatches_of(self, rank: int) -> range:
        return range(rank * self.accumulation, (rank + 1) * self.accumulation)

    def positions(self, step: int, index: int) -> range:
        """Return the positions in the sample stream of microbatch `index` of step `step` (both from 0)."""
        start = step * self.global_batch + index * self.microbatch
        return range(start, start + self.microbatch)

    def epochs_after(self, num_steps: int) -> float:
        return num_steps * self.global_batch / self.num_samples

    def should_evaluate_after(self, num_steps: int) -> bool:
        """Return True after the last step and after a step that passes a multiple of `evaluate_every` epochs."""
        if num_steps == self.num_steps or not self.evaluate_every:
            return num_steps == self.num_steps
        span = self.evaluate_every * self.num_samples
        before, after = (n * self.global_batch // span for n in (num_steps - 1, num_steps))
        return after > before


def plan_steps(
    batch: BatchSettings,
    num_ranks: int,
    num_samples: int,
    epochs: float,
    evaluate_every: int = 1,
    num_steps: int | None = None,  # overrides epochs
) -> StepPlan:
    check_ranks(batch, num_ranks)
    if num_steps is None:
        # With the margin 0.29 epochs of 100 samples are 29 steps of one, not 28: 0.29 has no exact binary form.
        num_steps = math.floor(epochs * num_samples / batch.global_batch + 1e-9)
    if num_steps == 0:
        enough = math.ceil(1000 * batch.global_batch / num_samples) / 1000
        raise UserError(
            f"train.epochs={epochs:g} of {num_samples} samples is less than one step of "
            f"batch.global={batch.global_batch}; nearest: train.epochs={enough}"
        )
    return StepPlan(
        global_batch=batch.global_batch,
        microbatch=batch.microbatch,
        num_ranks=num_ranks,
        num_samples=num_samples,
        num_steps=num_steps,
        evaluate_every=evaluate_every,
    )


def check_ranks(batch: BatchSettings, num_ranks: int) -> None:
    if num_ranks < 1:
        raise UserError(f"{num_ranks} ranks: a run needs at least one rank; for example --ranks 1")
    if batch.num_microbatches % num_ranks:
        span = batch.microbatch * num_ranks
        nearest_batch = max(1, round(batch.global_batch / span)) * span
        fewer = most_ranks(batch, num_ranks)
        micro = fitting_microbatch(batch, num_ranks)
        spans = f"BatchNorm normalises over {micro} images instead of {batch.microbatch}"
        fits = f"batch.micro={micro}, with which {spans}; or " if micro else ""
        raise UserError(
            f"batch.global={batch.global_batch} makes {batch.num_microbatches} microbatches of {batch.microbatch}, "
            f"which {num_ranks} ranks cannot share evenly; "
            f"nearest: {fits}{fewer} rank{'s' * (fewer > 1)}, or batch.global={nearest_batch}"
        )


def fitting_microbatch(batch: BatchSettings, num_ranks: int) -> int | None:
    """Return the microbatch nearest to the batch's (as a ratio) that ranks can share evenly, or None if there is none.

    A microbatch of one image is not offered: BatchNorm cannot normalise it.
    """
    share, rest = divmod(batch.global_batch, num_ranks)
    sizes = [] if rest else [size for size in range(2, share + 1) if share % size == 0]
    return min(sizes, key=lambda size: abs(math.log(size / batch.microbatch)), default=None)


def most_ranks(batch: BatchSettings, limit: int) -> int:
    """Return the largest number of ranks up to `limit` that divides the number of microbatches."""
    highest = min(limit, batch.num_microbatches)
    return next(ranks for ranks in range(highest, 0, -1) if batch.num_microbatches % ranks == 0)
