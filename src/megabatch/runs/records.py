"""Records of a run: the rows of metrics.jsonl, which have a `kind`, summary.json, mistakes.json and step.json.

The bounds of fields are checked when a file is read, since it may have any content.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Seconds = Annotated[float, Meta(ge=-1e6, le=1e15)]  # a difference of clocks may be slightly negative


class TimeBreakdown(Struct):
    """Seconds spent on making batches.

    Attributes:
        read: Reading files.
        decode: Decoding images.
        augment: Cropping, resizing and flipping.
        copy: Copying to the device.
    """

    read: Seconds = 0.0
    decode: Seconds = 0.0
    augment: Seconds = 0.0
    copy: Seconds = 0.0

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
    """Seconds of rank 0 since the previous row. All of them add up to the wall time of the run.

    On an accelerator, forward, backward, comm and update are measured on the device. Its idle time is data while the
    host waits for images, and other at all other times.

    Attributes:
        data: Waiting for images.
        forward: Forward.
        backward: Backward.
        comm: Waiting for other ranks and the network after all gradients of this rank were ready.
        update: The optimizer's step.
        evaluation: Evaluating.
        checkpoint: Waiting for a checkpoint.
        other: Writing rows, updating the screen, comparing ranks.
    """

    data: Seconds = 0.0
    forward: Seconds = 0.0
    backward: Seconds = 0.0
    comm: Seconds = 0.0
    update: Seconds = 0.0
    evaluation: Seconds = 0.0
    checkpoint: Seconds = 0.0
    other: Seconds = 0.0

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, part) for part in self.__struct_fields__)


class NoiseRecord(Struct, frozen=True, kw_only=True):
    """The gradient noise scale on a measured step, as in `runs.noise`.

    Attributes:
        signal: Estimate of this step's squared true gradient. It may be negative.
        trace: Estimate of the trace of the covariance of one sample's gradient.
        scale: The noise scale in samples, from averages over the last measured steps.
        low: Its lower bound with 95 % confidence; None before the fourth measured step.
        high: Its upper bound; None if there is none, or if low is None.
        over_run: The critical batch of the run so far: the mean of `scale` over its progress.
        over_run_low: The mean of `low`, for which the first three measured steps have `scale`; None if `low` is.
        over_run_high: The mean of `high`, infinite if there is none; None if it has no value or `low` is None.
        reason: Why `scale` is None.
    """

    signal: float | None = None
    trace: float | None = None
    scale: Amount | None = None
    low: Amount | None = None
    high: Amount | None = None
    over_run: Amount | None = None
    over_run_low: Amount | None = None
    over_run_high: Amount | None = None
    reason: str | None = None


class StepRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """A row of metrics.jsonl for a training step.

    Attributes:
        step: Optimizer steps taken, from 1.
        epoch: Passes over the training set.
        loss: Mean over the global batch, before the update.
        top1: Share of its images, as augmented, whose most likely class is right; of mixed images the class with the
            larger share. None if the network has no score per class in training.
        lr: Learning rate.
        loss_scale: The loss scale; 1 if the loss is not scaled.
        skipped: Gradients overflowed, so weights, optimizer and statistics did not change.
        image_size: Side of the training images.
        images_per_s: Training images per second.
        data_wait_s: Seconds for which rank 0's host waited for images: on a CPU, `times.data`. On a GPU, `times.data`
            is the time of the device, which may still compute the previous step while the host waits.
        data_wait: The same, by the stage that made the images.
        skipped_images: Unreadable images, with the reason; each was replaced by another.
        comm_wait_s: Seconds for which rank 0 waited for other ranks after all its gradients were ready: `times.comm`.
        straggler: The rank that waited least for others so far, because they waited for it.
        straggler_delay_s: Seconds per step that it waited less than the median of the others.
        evaluated: The next row is an evaluation.
        noise: The gradient noise scale; None on steps that are not measured (`train.noise_every`).
        wall_s: Wall time of the run, as in its summary.
        times: The time since the previous row, by activity.

    Examples:
        >>> row = '{"kind":"evaluation","top1":0.9,"top5":1.0,"test_loss":0.3,"class_top1":[0.9],' \\
        ...     '"samples_evaluated":10,"step":39,"epoch":1.0,"wall_s":4.0,"times":{}}'
        >>> msgspec.json.decode(row, type=StepRecord | EvaluationRecord).top1
        0.9
    """

    step: Count
    epoch: Passes
    loss: float
    top1: Share | None = None
    lr: float
    loss_scale: Scale
    skipped: bool
    image_size: Count
    images_per_s: Amount
    data_wait_s: Seconds
    data_wait: TimeBreakdown = field(default_factory=TimeBreakdown)
    skipped_images: list[str] = field(default_factory=list)
    comm_wait_s: Seconds
    straggler: Count
    straggler_delay_s: Amount
    evaluated: bool = False
    noise: NoiseRecord | None = None
    wall_s: Amount
    times: StepTimes


class ReliabilityBin(Struct, frozen=True, array_like=True):
    """The test images whose confidence, the softmax of the predicted class, is in one bin of equal width.

    Attributes:
        count: Number of test images.
        confidence: Their mean confidence; 0 if there are none.
        accuracy: Their top-1; 0 if there are none.
    """

    count: Count
    confidence: Share
    accuracy: Share


class Evaluation(Struct, frozen=True, kw_only=True):
    """The result of an evaluation. Means over classes are over those that have test images.

    Attributes:
        top1: Share of test images whose most likely class is right, or one of several labels.
        top5: Share of test images whose class is among the five most likely.
        test_loss: Mean cross-entropy, without label smoothing or class weights. Of multi-label images the binary
            cross-entropy, summed over classes.
        class_top1: Top-1 of each class; None for a class without test images. Of multi-label images the recall.
        samples_evaluated: Number of test images.
        raw_top1: Top-1 of the weights themselves, if the other results are those of their moving average.
        precision: Mean over classes of the precision, the share of a class's predictions that are right. It is 0 for a
            class that is never predicted.
        balanced_accuracy: Mean over classes of `class_top1`, which is the recall.
        f1: Mean over classes of the harmonic mean of precision and recall.
        ece: Expected calibration error: mean difference of confidence and accuracy over the bins of `reliability`.
        class_precision: Precision of each class; None for a class that is never predicted.
        reliability: The reliability curve: bins of equal width, from confidence 0 to 1.
        mean_average_precision: Mean over classes of the average precision of multi-label images; None for others.
        unreadable: Test images that were left out, with the reason.
    """

    top1: Share
    top5: Share
    test_loss: float
    class_top1: list[Share | None]
    samples_evaluated: Count
    raw_top1: Share | None = None
    precision: Share | None = None
    balanced_accuracy: Share | None = None
    f1: Share | None = None
    ece: Share | None = None
    class_precision: list[Share | None] = field(default_factory=list)
    reliability: list[ReliabilityBin] = field(default_factory=list)
    mean_average_precision: Share | None = None
    unreadable: list[str] = field(default_factory=list)

    @property
    def score(self) -> float:
        """The result by which evaluations of a run are compared."""
        return self.top1 if self.mean_average_precision is None else self.mean_average_precision


Slowdown = Literal["power cap", "heat", "power brake", "hardware slowdown"]


class GpuUse(Struct, frozen=True, kw_only=True):
    """The use of a rank's GPU between two evaluations, as sampled by NVML once per second.

    Attributes:
        utilization: Share of the time in which a kernel ran; None if the GPU does not report it, like the others.
        power_w: Mean power.
        clock_mhz: Mean clock of the multiprocessors.
        temperature_c: Highest temperature.
        slowed: Share of the samples in which the clock was lowered, by reason.
        ecc_errors: Uncorrected memory errors since the run started or was resumed.
        xid_errors: Critical errors that the driver reported in that time.
    """

    utilization: Share | None = None
    power_w: Amount | None = None
    clock_mhz: Amount | None = None
    temperature_c: Count | None = None
    slowed: dict[Slowdown, Share] = field(default_factory=dict)
    ecc_errors: Count | None = None
    xid_errors: Count = 0


class EvaluationRecord(Evaluation, frozen=True, kw_only=True, tag_field="kind", tag="evaluation"):
    """A row of metrics.jsonl for an evaluation.

    Attributes:
        step: Optimizer steps taken.
        epoch: Passes over the training set.
        resident_mb: Memory of rank 0's process.
        device_mb: Peak memory of rank 0's accelerator so far; None on a CPU.
        wall_s: Wall time of the run, as in its summary.
        times: The time since the previous row, by activity.
        rank_waits_s: Seconds for which each rank waited for others since the last evaluation or start. The straggler
            waits least.
        rank_gpus: The use of the GPU of each rank in that time; None for a rank without NVML. Empty on CPUs.
    """

    step: Count
    epoch: Passes
    resident_mb: Amount | None = None
    device_mb: Amount | None = None
    wall_s: Amount
    times: StepTimes
    rank_waits_s: list[Seconds] = field(default_factory=list)
    rank_gpus: list[GpuUse | None] = field(default_factory=list)


Record = StepRecord | EvaluationRecord


class Straggler(Struct, frozen=True):
    """The rank that delayed the others most.

    Attributes:
        rank: Its number.
        delay_s: Seconds per step for which the others waited.
        share: Share of the time of training steps.
    """

    rank: Count
    delay_s: Amount
    share: Amount


class SaveTimes(Struct, kw_only=True):
    """The cost of checkpoints for training.

    Attributes:
        count: Checkpoints written.
        failed: Failed attempts to write one.
        overtaken: Checkpoints that were due but replaced by newer ones because the disk was busy.
        stall_s: Seconds for which training waited, in total.
        longest_stall_s: The longest of these waits.
    """

    count: Count = 0
    failed: Count = 0
    overtaken: Count = 0
    stall_s: Amount = 0.0
    longest_stall_s: Amount = 0.0

    def add_stall(self, stall_s: float) -> None:
        self.stall_s += stall_s
        self.longest_stall_s = max(self.longest_stall_s, stall_s)


class Summary(Struct, frozen=True, kw_only=True):
    """The result of a run, as in summary.json.

    Attributes:
        status: "finished", "stopped", "diverged" or "failed".
        top1: Top-1 of the last evaluation; None before the first, like the other results.
        top5: Top-5 of the last evaluation.
        best_top1: The best top-1 of all evaluations.
        training_top1: Mean top-1 of the training steps, on augmented images, in the epoch of the last evaluation.
        test_loss: Mean cross-entropy of the last evaluation.
        class_top1: Top-1 of each class.
        precision: Mean precision over classes, and the next three, of the last evaluation.
        balanced_accuracy: Mean recall over classes.
        f1: Mean F1 over classes.
        ece: Expected calibration error.
        mean_average_precision: Mean average precision of multi-label images; None for others, like the next.
        best_mean_average_precision: The best of all evaluations.
        samples_evaluated: Number of test images.
        steps: Optimizer steps taken.
        ended_early: Why the run ended before its last step, as `train.patience` and `train.stop_at_target` ask.
        skipped_steps: Steps that were skipped because gradients overflowed.
        loss_scale: The last loss scale.
        resumed_from_step: The step of the last resumption.
        wall_s: Seconds of training and evaluation. Steps that a resumption repeats are counted once.
        images_per_s: Images per second over all training steps, without evaluations.
        data_wait_share: Share of the time of training steps spent waiting for images.
        data_wait: The same, by the stage that made the images.
        skipped_images: Unreadable images that were replaced by others, each counted once.
        comm_wait_share: Share of the time of training steps spent waiting for communication.
        straggler: The rank that delayed the others most since the last resumption; None on one rank.
        resident_mb: Memory of rank 0's process at the last evaluation.
        device_mb: Peak memory of rank 0's accelerator; None on a CPU.
        saves: The cost of checkpoints.
        noise: The gradient noise scale on the last measured step; None if no step was measured.
        time_to_target_s: Wall time of the first evaluation that reached `train.target_top1`.
    """

    status: Status
    top1: Share | None
    top5: Share | None
    best_top1: Share | None
    training_top1: Share | None = None
    test_loss: float | None
    class_top1: list[Share | None] | None
    precision: Share | None = None
    balanced_accuracy: Share | None = None
    f1: Share | None = None
    ece: Share | None = None
    mean_average_precision: Share | None = None
    best_mean_average_precision: Share | None = None
    samples_evaluated: Count
    steps: Count
    ended_early: Annotated[str, Meta(max_length=200)] | None = None
    skipped_steps: Count
    loss_scale: Scale | None
    resumed_from_step: Count | None
    wall_s: Amount
    images_per_s: Amount | None
    data_wait_share: Seconds | None
    data_wait: TimeBreakdown | None
    skipped_images: Count
    comm_wait_share: Seconds | None
    straggler: Straggler | None
    resident_mb: Amount | None
    device_mb: Amount | None = None
    saves: SaveTimes
    noise: NoiseRecord | None = None
    time_to_target_s: Amount | None


MOST_CONFUSIONS = 10_000  # the most frequent pairs of classes are kept
MOST_CLASSES = 1_000  # with more classes, pairs are not counted: their matrix would be all-reduced


class Confusion(Struct, frozen=True, array_like=True):
    """The number of images of one class that were predicted as another."""

    label: Count
    predicted: Count
    count: Count


class Example(Struct, frozen=True, kw_only=True):
    """A test image that was classified wrongly."""

    sample: Count  # its number among the test images
    label: Count
    predicted: Count
    confidence: Share  # softmax of the predicted class
    picture: Annotated[str, Meta(max_length=1 << 20)]  # a small PNG or JPEG, in base64


class Mistakes(Struct, frozen=True, kw_only=True):
    """mistakes.json: confusions and examples of the newest evaluation."""

    step: Count = 0  # after which the model was evaluated
    class_counts: list[Count]  # test images of each class
    confusions: list[Confusion] | None  # the most frequent first; None: too many classes
    examples: list[Example] = field(default_factory=list)  # the most confident first; [] with train.examples=0


Lane = Literal["training", "node", "network"]


class Span(Struct, frozen=True, kw_only=True):
    """An activity of a lane; times are in seconds since the start of the step."""

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
    """step.json: one ordinary step of rank 0, and when each gradient bucket was ready and all-reduced."""

    step: Count
    duration_s: Seconds
    spans: list[Span] = field(default_factory=list)
    buckets: list[TracedBucket] = field(default_factory=list)
