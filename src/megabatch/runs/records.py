"""The rows of metrics.jsonl, and summary.json.  Every row says what it is (`kind`).

Limits hold where a file is read: it may say anything.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

# What the time of making batches is spent on.

Seconds = Annotated[float, Meta(ge=-1e6, le=1e15)]  # a difference of clocks may be a little less than nothing


class TimeBreakdown(Struct):
    """Seconds, by what they were spent on."""

    read: Seconds = 0.0
    decode: Seconds = 0.0
    augment: Seconds = 0.0  # crop, resize, flip
    copy: Seconds = 0.0  # to the device

    @property
    def total(self) -> float:
        return self.read + self.decode + self.augment + self.copy

    def add(self, other: "TimeBreakdown", factor: float = 1.0) -> None:
        for part in self.__struct_fields__:
            setattr(self, part, getattr(self, part) + factor * getattr(other, part))

    def scaled(self, factor: float) -> "TimeBreakdown":
        result = TimeBreakdown()
        result.add(self, factor)
        return result


Count = Annotated[int, Meta(ge=0, le=2**53)]
Passes = Annotated[float, Meta(ge=0, le=1e9)]  # over the training set
Amount = Annotated[float, Meta(ge=0, le=1e15)]  # images per second, MB, seconds in all
Share = Annotated[float, Meta(ge=0, le=1)]
Scale = Annotated[float, Meta(gt=0, le=1e300)]
Status = Literal["finished", "stopped", "diverged", "failed"]


class StepTimes(Struct, frozen=True, kw_only=True):
    """The time since the row before, on rank 0, by what it was spent on.  All of them add up to the run's wall time.

    On an accelerator forward, backward, comm and update are its own; data is what it was idle for while the host waited
    for images, and other what it was idle for besides.
    """

    data: Seconds = 0.0  # waited for images
    forward: Seconds = 0.0
    backward: Seconds = 0.0
    comm: Seconds = 0.0  # waited for other ranks and the network, after all own gradients were ready
    update: Seconds = 0.0
    evaluation: Seconds = 0.0
    checkpoint: Seconds = 0.0  # training was held by one
    other: Seconds = 0.0  # rows, the screen, comparing ranks

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, part) for part in self.__struct_fields__)


class StepRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    step: Count  # optimizer steps taken, from 1
    epoch: Passes  # passes over the training set
    loss: float  # mean over the global batch, before the update
    lr: float
    loss_scale: Scale  # 1 where there is none
    skipped: bool  # gradients overflowed: weights, optimizer and statistics were left as they are
    images_per_s: Amount
    data_wait_s: Seconds  # rank 0 waited for images
    data_wait: TimeBreakdown = field(default_factory=TimeBreakdown)  # the same, by what was being done to them
    skipped_images: list[str] = field(default_factory=list)  # not readable, and why; another stood in for each
    comm_wait_s: Seconds  # rank 0 waited for other ranks, after all its gradients were ready
    straggler: Count  # the rank that has waited least for others so far, since they waited for it
    straggler_delay_s: Amount  # by how much less than the median of the others, a step
    evaluated: bool = False  # an evaluation follows: the next row
    wall_s: Amount  # of the run, as in its summary
    times: StepTimes


class Evaluation(Struct, frozen=True, kw_only=True):
    top1: Share
    top5: Share
    test_loss: float  # mean cross-entropy, without label smoothing
    class_top1: list[Share | None]  # None for a class without test images
    samples_evaluated: Count
    unreadable: list[str] = field(default_factory=list)  # test images that were left out, and why


class EvaluationRecord(Evaluation, frozen=True, kw_only=True, tag_field="kind", tag="evaluation"):
    step: Count
    epoch: Passes
    resident_mb: Amount | None = None  # memory of rank 0's process
    device_mb: Amount | None = None  # the most that rank 0 has taken of its accelerator so far; None on a CPU
    wall_s: Amount  # of the run, as in its summary
    times: StepTimes
    # Each rank waited for others so long, in the steps since the last evaluation or start: the straggler least.
    rank_waits_s: list[Seconds] = field(default_factory=list)


Record = StepRecord | EvaluationRecord


class Straggler(Struct, frozen=True):
    rank: Count
    delay_s: Amount  # a step, for which the others waited
    share: Amount  # of the time of training steps


class SaveTimes(Struct, kw_only=True):
    """What checkpoints have cost the steps."""

    count: Count = 0  # that were written
    failed: Count = 0  # attempts to write one
    overtaken: Count = 0  # that were due, and passed over for newer ones because the disk was not done
    stall_s: Amount = 0.0  # training was held by them, in all
    longest_stall_s: Amount = 0.0

    def add_stall(self, stall_s: float) -> None:
        self.stall_s += stall_s
        self.longest_stall_s = max(self.longest_stall_s, stall_s)


class Summary(Struct, frozen=True, kw_only=True):
    status: Status
    top1: Share | None
    top5: Share | None
    best_top1: Share | None
    test_loss: float | None
    class_top1: list[Share | None] | None
    samples_evaluated: Count
    steps: Count
    skipped_steps: Count  # of them, since their gradients overflowed
    loss_scale: Scale | None  # the last
    resumed_from_step: Count | None  # where the last resumption began
    wall_s: Amount  # of training, evaluations included; what a resumption repeats is counted once
    images_per_s: Amount | None  # over all training steps, evaluations left out
    data_wait_share: Seconds | None  # of the time of training steps
    data_wait: TimeBreakdown | None  # the same, by what was being done to the images
    skipped_images: Count  # that could not be read, each counted once, and for which others stood in
    comm_wait_share: Seconds | None
    straggler: Straggler | None  # the rank that delayed the others most, since the last resumption; None on one rank
    resident_mb: Amount | None  # memory of rank 0's process at the last evaluation
    device_mb: Amount | None = None  # the most that rank 0 has taken of its accelerator; None on a CPU
    saves: SaveTimes
    time_to_target_s: Amount | None  # wall time of the first evaluation that reached train.target_top1


# mistakes.json: what the newest evaluation of a run took for what, with pictures of a few test images.

MOST_CONFUSIONS = 10_000  # pairs of classes that are kept, the most frequent ones
MOST_CLASSES = 1_000  # beyond that, pairs are not counted: their matrix would be all-reduced


class Confusion(Struct, frozen=True, array_like=True):
    """So many images of one class were taken for another."""

    label: Count
    predicted: Count
    count: Count


class Example(Struct, frozen=True, kw_only=True):
    """A test image that was taken for another class."""

    sample: Count  # its number among the test images
    label: Count
    predicted: Count
    confidence: Share  # softmax of the class that it was taken for
    picture: Annotated[str, Meta(max_length=1 << 20)]  # a small PNG or JPEG, in base64


class Mistakes(Struct, frozen=True, kw_only=True):
    step: Count = 0  # after which it was evaluated
    class_counts: list[Count]  # test images of each class
    confusions: list[Confusion] | None  # the most frequent first; None: too many classes
    examples: list[Example] = field(default_factory=list)  # the most confident first; [] with train.examples=0


# step.json: one ordinary step of rank 0, and when each bucket of its gradients was ready and all-reduced.

Lane = Literal["training", "node", "network"]


class Span(Struct, frozen=True, kw_only=True):
    """What a lane did; seconds since the step began."""

    lane: Lane
    name: str  # forward, backward, ...; of node and network the phase, such as "all_reduce in the node"
    begin_s: Seconds
    end_s: Seconds
    bucket: Count | None = None  # of node and network; None: that of the step's metrics
    is_wait: bool = False  # for other ranks, or for the network


class TracedBucket(Struct, frozen=True, kw_only=True):
    bucket: Count
    num_bytes: Count
    plan: str
    ready_s: Seconds
    reduced_s: Seconds


class StepTrace(Struct, frozen=True, kw_only=True):
    step: Count
    duration_s: Seconds
    spans: list[Span] = field(default_factory=list)
    buckets: list[TracedBucket] = field(default_factory=list)
