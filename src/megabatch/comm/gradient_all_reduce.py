"""The all-reduce of a model's gradients: buckets go to the reducer as backward fills them, and travel underneath it."""

import atexit
import os
import warnings
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from megabatch.comm.accelerator.stream_times import StreamTimes
from megabatch.comm.accelerator.streams import StreamReducer
from megabatch.comm.cpu.barrier import Header
from megabatch.comm.cpu.workers import Reducer
from megabatch.comm.faults.failure import FailureReport
from megabatch.comm.faults.progress import BackwardProgress
from megabatch.comm.faults.watchdog import Watchdog
from megabatch.comm.groups import Groups
from megabatch.comm.layouts import BucketLayouts
from megabatch.comm.settings import CommSettings
from megabatch.comm.tune import measure_drift, tune
from megabatch.comm.work import STEP_METRICS
from megabatch.errors import UserError
from megabatch.planning.algorithms import candidate_plans, default_plan
from megabatch.planning.choosing import is_made_for
from megabatch.planning.pipeline import RecordedBackward
from megabatch.planning.plan import CommDtype, Plan, axes_of
from megabatch.planning.topology import Axis, ClusterShape, Topology
from megabatch.planning.tuning import Tuning
from megabatch.ranks.backends import Backend
from megabatch.telemetry.activity import Activity, LastWords
from megabatch.telemetry.timeline import ALL_STEPS, NO_STEPS, NoTimeline, Timeline
from megabatch.torch_api import queue_callback

# Work on a rank's own device, whichever is the current one: a script need not have called set_device.


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """What is opened inside, and collectives of torch.distributed that choose a device, take this one."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


# Which all-reduce a bucket takes: one plan for all, until `tune` has chosen one for each.


class PlansInUse:
    """`in_memory`: ranks of a host all-reduce through its memory.  `tunes`: there may be a choice."""

    def __init__(
        self, settings: CommSettings, shape: ClusterShape, in_memory: bool, on_accelerators: bool, tunes: bool
    ) -> None:
        algorithm = settings.algorithm
        self.default = require_plan(algorithm, settings.dtype, shape, in_memory)
        self.exact = require_plan(algorithm, "fp32", shape, in_memory)  # of the step's metrics: nothing is rounded
        self.candidates = [self.default]
        if tunes:
            self.candidates = candidate_plans(algorithm, settings.dtype, shape, in_memory, on_accelerators)
        self.tuning: Tuning | None = None  # None: the default plan for all
        self.drift = 1.0  # see planning.choosing.drift
        self.is_chosen_again = False  # what was stored is not for these ranks and gradients

    @property
    def axes(self) -> set[Axis]:
        """Of all plans that a bucket may take: until `tune` has chosen, of all candidates."""
        chosen = [bucket.plan for bucket in self.tuning.buckets] if self.tuning else self.candidates
        return axes_of([self.default, self.exact, *chosen])

    def plan_of(self, index: int, num_elements: int) -> Plan:
        """Before DDP has made its final buckets, after the first backward, they are not those of the tuning."""
        buckets = self.tuning.buckets if self.tuning else []
        is_tuned = index < len(buckets) and buckets[index].num_elements == num_elements
        return buckets[index].plan if is_tuned else self.default

    @property
    def names(self) -> str:
        return self.tuning.algorithms if self.tuning else self.default.name


def require_plan(algorithm: str, dtype: CommDtype, shape: ClusterShape, in_memory: bool) -> Plan:
    plan = default_plan(algorithm, dtype, shape, in_memory)
    if plan is None:
        sizes = " and ".join(str(size) for size, _ in shape.node_sizes)
        raise UserError(
            f"comm.algorithm={algorithm!r} needs hosts with equally many ranks, not {sizes}; "
            "nearest: comm.algorithm=hierarchical"
        )
    return plan


class GradientAllReduce:
    """Close it when no backward will follow; a `with` does."""

    def __init__(
        self,
        model: nn.Module,
        group: Any,
        device: torch.device,
        settings: CommSettings,
        tunes: bool = False,
        scale: float | None = None,  # what sums are multiplied by
        backend: Backend | None = None,  # that of the device
        topology: Topology | None = None,  # as the ranks say
        activity: Activity | None = None,  # of a trainer; None: backward is all that we see
        last_words: LastWords | None = None,
    ) -> None:
        self.settings, self.device, self.scale, self.pid = settings, device, scale, os.getpid()
        self.layouts = BucketLayouts(model)
        self.summed_elements = 0  # by the newest backward
        activity = activity or Activity(settings.timeout_s, is_followed=False)
        with ExitStack() as stack, on_device(device):
            groups = stack.enter_context(closing(Groups(group, device, activity.patience_s, backend, topology)))
            self.topology = groups.topology
            on_accelerators = device.type != "cpu"
            self.plans = PlansInUse(settings, self.topology.shape, self.has_room(groups), on_accelerators, tunes)
            groups.open(self.plans.axes)
            self.timeline: Timeline | NoTimeline = NoTimeline()
            if tunes or settings.timeline:  # a trainer's, which may want to see a few steps
                self.timeline = Timeline(groups.rank, ALL_STEPS if settings.timeline else NO_STEPS)
            times = StreamTimes(device, self.timeline) if on_accelerators else None
            self.device_clock = times.clock if times else None
            self.progress = BackwardProgress(self.layouts, times)
            watchdog = Watchdog(
                groups.store,
                groups.rank,
                groups.names,
                activity,
                self.progress,
                last_words or LastWords(groups.names[groups.rank]),
                groups.set_timeout,
            )
            self.failure = FailureReport(groups, self.layouts, stack.enter_context(closing(watchdog)))
            self.reducer: Reducer | StreamReducer
            if times:
                self.reducer = StreamReducer(groups, self.failure, times)
            else:
                self.reducer = Reducer(groups, self.failure, self.timeline)
            stack.enter_context(closing(self.reducer))
            self.stack = stack.pop_all()

    def has_room(self, groups: Groups) -> bool:
        """True if the gradients of all ranks of a host fit into its memory, twice: DDP makes its buckets again."""
        if groups.shareable_bytes is None:
            return False
        num_bytes = 2 * groups.topology.shape.largest_node * self.layouts.num_bytes
        if num_bytes <= groups.shareable_bytes:
            return True
        if groups.rank == 0:
            warnings.warn(
                f"/dev/shm has {groups.shareable_bytes:,} bytes left, gradients need {num_bytes:,}; they are reduced "
                "through sockets, which is slower: make it larger (docker: --shm-size)",
                stacklevel=2,
            )
        return False

    def tune(self, backward: RecordedBackward, stored: Tuning | None) -> Tuning:
        """Chooses buckets and plans for these gradients, or takes what was stored for them.  All ranks call it."""
        with on_device(self.device):
            if stored and is_made_for(stored, self.topology, backward, self.plans.candidates):
                if self.topology.num_nodes > 1:  # elsewhere there is no choice that links could change
                    self.plans.drift = measure_drift(self.reducer, stored, self.settings)
            else:
                self.plans.is_chosen_again = stored is not None
                stored = tune(self.reducer, self.plans.candidates, backward, self.settings)
            self.plans.tuning = stored
            self.reducer.groups.close_others(self.plans.axes)
        return stored

    @property
    def plan(self) -> Plan:
        """Of every bucket that was not tuned: of all of them, where `attach` has made this."""
        return self.plans.default

    @property
    def waited_s(self) -> float:
        """For other ranks and the network, in all; on accelerators, what is known of it without waiting for them."""
        return self.reducer.waited_s

    @property
    def exposed_wait_s(self) -> float | None:
        """Of the newest step that has ended on an accelerator: from the end of backward to that of the last all-reduce.
        None on CPUs, where `ready_s` is a time of the host that knows it."""
        return self.reducer.exposed_wait_s

    @property
    def ready_s(self) -> float:
        """When the newest bucket was ready: after the last one, backward waits for other ranks.  On accelerators, when
        it was issued."""
        return self.progress.ready_s

    @property
    def num_steps(self) -> int:
        """Whose gradients have been all-reduced, or are being so, from the first one of the run on."""
        return self.progress.step

    def count_from(self, step: int) -> None:
        """The next backward is that of `step` (from 0), which messages call step + 1."""
        self.progress.step, self.progress.first = step, 1

    def take_finite(self) -> bool:
        """After backward: whether all gradients that it has summed are known to be finite.  Ranks of one host look
        while they sum, if somebody has asked before."""
        runner = self.reducer.runner
        summed, finite = self.summed_elements, runner.finite_elements
        self.summed_elements = runner.finite_elements = 0
        runner.checks = True
        return 0 < summed == finite

    def start_metrics(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """All-reduces a small tensor beside the buckets, exactly: no 16 bits travel.  Always the same tensor."""
        header = Header(self.progress.step, STEP_METRICS)
        return self.reducer.start(STEP_METRICS, tensor, self.plans.exact, header, None, is_last=False)

    def start_bucket(self, bucket: "dist.GradBucket") -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        self.progress.bucket_is_ready()
        index, tensor, is_last = bucket.index(), bucket.buffer(), bucket.is_last()
        header = Header(self.progress.step, index, self.layouts.number(bucket, tensor))
        plan = self.plans.plan_of(index, tensor.numel())
        self.summed_elements += tensor.numel()
        future = self.reducer.start(index, tensor, plan, header, self.scale, is_last)
        self.progress.bucket_has_started(index, future, is_last)
        if is_last:
            queue_callback(lambda: self.end_backward(future))
        return future

    def end_backward(self, last: torch.futures.Future[torch.Tensor]) -> None:
        last.wait()  # on accelerators it is complete: the stream waits, and not the host
        self.raise_error()

    def raise_error(self) -> None:
        """The first error of this rank's all-reduces, if there was one.  To be asked, too, after the host has waited
        for the device: what it has read then may be what an aborted all-reduce has left."""
        self.failure.raise_error()

    def close(self) -> None:
        if os.getpid() == self.pid:  # a forked process must not speak for its parent
            atexit.unregister(self.close)
            with on_device(self.device):
                self.stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.failure.leave(error)
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Detached, (self.settings,)


class Detached(NamedTuple):
    """What torch.save keeps of the all-reduce of a model.  A model that is loaded uses DDP's own: attach it again."""

    settings: CommSettings
