"""The all-reduce of a model's gradients: buckets go to the reducer as backward fills them, and travel underneath it."""

import atexit
import os
import warnings
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from megabatch.comm.barrier import Header
from megabatch.comm.device import on_device
from megabatch.comm.failure import FailureReport
from megabatch.comm.groups import Groups
from megabatch.comm.layouts import BucketLayouts
from megabatch.comm.plans import PlansInUse
from megabatch.comm.progress import BackwardProgress
from megabatch.comm.reducer import Reducer
from megabatch.comm.settings import CommSettings
from megabatch.comm.stream_reducer import StreamReducer
from megabatch.comm.stream_times import StreamTimes
from megabatch.comm.timeline import ALL_STEPS, NO_STEPS, NoTimeline, Timeline
from megabatch.comm.tune import measure_drift, tune
from megabatch.comm.watchdog import Watchdog
from megabatch.comm.work import STEP_METRICS
from megabatch.planning.backward import RecordedBackward
from megabatch.planning.choosing import is_made_for
from megabatch.planning.plan import Plan
from megabatch.planning.topology import Topology
from megabatch.planning.tuning import Tuning
from megabatch.ranks.activity import Activity, LastWords
from megabatch.ranks.backends import Backend
from megabatch.torch_api import queue_callback


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
