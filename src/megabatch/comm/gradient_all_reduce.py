"""All-reduce of a model's gradients.  Each bucket starts when backward has filled it, and overlaps with backward."""

import atexit
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from megabatch.comm.accelerator.stream_times import StreamTimes
from megabatch.comm.accelerator.streams import StreamReducer
from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.comm.cpu.workers import Reducer
from megabatch.comm.faults.failure import FailureHandler
from megabatch.comm.faults.watchdog import BackwardProgress, Watchdog
from megabatch.comm.groups import Groups
from megabatch.comm.layouts import BucketLayouts
from megabatch.comm.settings import CommSettings
from megabatch.comm.tune import measure_drift, tune
from megabatch.comm.work import NOISE, STEP_METRICS
from megabatch.errors import UserError
from megabatch.planning.algorithms import candidate_plans, default_plan
from megabatch.planning.choosing import is_made_for
from megabatch.planning.pipeline import RecordedBackward
from megabatch.planning.plan import CommDtype, Plan, axes_of
from megabatch.planning.topology import Axis, ClusterShape, Topology
from megabatch.planning.tuning import Tuning
from megabatch.ranks.backends import Backend
from megabatch.runs.noise import ONE_MICROBATCH, NoiseAverage, noise_record
from megabatch.runs.records import NoiseRecord
from megabatch.telemetry.activity import Activity, ExitReporter
from megabatch.telemetry.timeline import ALL_STEPS, NO_STEPS, Timeline
from megabatch.torch_api import queue_callback


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make this the current device, for scripts that do not call set_device."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


class PlansInUse:
    """The plan of each bucket: one for all until `tune` chooses one for each.

    Args:
        in_memory: Ranks of a node use shared memory.
        in_16_bits: Some gradients are 16 bits wide.
        tunes: Plans are chosen by `tune`; otherwise the default plan is the only candidate.
    """

    def __init__(
        self,
        settings: CommSettings,
        shape: ClusterShape,
        in_memory: bool,
        on_accelerators: bool,
        tunes: bool,
        in_16_bits: bool = False,
    ) -> None:
        algorithm, dtype = settings.algorithm, settings.dtype
        in_16_bits = in_16_bits or dtype != "same"
        self.default = require_plan(algorithm, dtype, shape, in_memory, in_16_bits)
        # For the metrics of a step: nothing is rounded.  It uses the groups of the default plan.
        self.exact = require_plan(algorithm, "same", shape, in_memory, in_16_bits)
        self.candidates = [self.default]
        if tunes:
            self.candidates = candidate_plans(algorithm, dtype, shape, in_memory, on_accelerators, in_16_bits)
        self.tuning: Tuning | None = None  # None: all buckets use the default plan
        self.drift = 1.0  # see planning.choosing.drift
        self.is_rechosen = False  # the stored tuning does not fit these ranks and gradients

    @property
    def axes(self) -> set[Axis]:
        """The axes of all plans that a bucket may use: before `tune`, those of all candidates."""
        chosen = [bucket.plan for bucket in self.tuning.buckets] if self.tuning else self.candidates
        return axes_of([self.default, self.exact, *chosen])

    def plan_of(self, index: int, num_elements: int) -> Plan:
        """Return the plan of a bucket.  Buckets that DDP rebuilds after the first backward get the default plan."""
        buckets = self.tuning.buckets if self.tuning else []
        is_tuned = index < len(buckets) and buckets[index].num_elements == num_elements
        return buckets[index].plan if is_tuned else self.default

    @property
    def names(self) -> str:
        """The names of the algorithms in use."""
        return self.tuning.algorithms if self.tuning else self.default.name


def require_plan(
    algorithm: str, dtype: CommDtype, shape: ClusterShape, in_memory: bool, in_16_bits: bool = False
) -> Plan:
    plan = default_plan(algorithm, dtype, shape, in_memory, in_16_bits)
    if plan is None:
        sizes = " and ".join(str(size) for size, _ in shape.node_sizes)
        raise UserError(
            f"comm.algorithm={algorithm!r} needs nodes with equally many ranks, not {sizes}; "
            "nearest: comm.algorithm=hierarchical"
        )
    return plan


class RankNoise:
    """The gradient noise scale of a script that uses `attach`: each rank's gradient is one microbatch (`runs.noise`).

    DDP averages over P ranks, so rank r adds h_r = g_r / P.  The squares of g_r are computed before a bucket is
    reduced, that of the mean after all buckets are.  The host reads them when the script asks.
    """

    def __init__(
        self, every: int, num_ranks: int, device: torch.device, sum_over_ranks: Callable[[torch.Tensor], None]
    ):
        self.every, self.num_ranks, self.sum_over_ranks = every, num_ranks, sum_over_ranks
        self.buckets: list[torch.Tensor] = []  # of this step, which are reduced in place
        self.norms: list[torch.Tensor] = []  # of this rank's gradients in them
        self.total = torch.zeros(1, dtype=torch.float64, device=device)
        self.unread: list[torch.Tensor] = []  # both squares of each measured step
        self.average = NoiseAverage()
        self.last: NoiseRecord | None = None

    def is_measured(self, step: int) -> bool:
        return (step + 1) % self.every == 0 and self.num_ranks > 1

    @torch.no_grad()
    def note(self, step: int, bucket: torch.Tensor) -> None:
        """Measure a bucket before it is reduced."""
        if self.is_measured(step):
            self.buckets.append(bucket)
            self.norms.append(norm_of(bucket))

    @torch.no_grad()
    def end_backward(self) -> None:
        """Add the step, if it was measured.  All buckets are reduced."""
        if not self.buckets:
            return
        torch.sum(torch.stack(self.norms).double().square(), dim=0, keepdim=True, out=self.total)
        self.sum_over_ranks(self.total)
        mean = torch.stack([norm_of(bucket) for bucket in self.buckets]).double().square().sum()
        self.unread.append(torch.cat([self.total / self.num_ranks**2, mean.reshape(1)]))
        self.buckets, self.norms = [], []

    def scale(self, samples: int) -> NoiseRecord | None:
        """Return the estimate if each rank has this number of samples per step; None before the first measured step."""
        if samples < 1:
            raise UserError(f"samples_per_rank={samples}: expected at least 1, the samples of one rank in a step")
        if self.num_ranks == 1:
            return NoiseRecord(reason=ONE_MICROBATCH)
        for squares in self.unread:
            of_ranks, of_mean = squares.tolist()
            found = noise_record(of_ranks, of_mean, self.num_ranks, samples)
            self.last = self.average.add(found, samples * self.num_ranks)
        self.unread = []
        return self.last


def norm_of(bucket: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(bucket, dtype=torch.promote_types(bucket.dtype, torch.float32))
    return norm


class GradientAllReduce:
    """The all-reduce of a model's gradients.  Close it after the last backward, or use `with`."""

    def __init__(
        self,
        model: nn.Module,
        group: Any,
        device: torch.device,
        settings: CommSettings,
        tunes: bool = False,
        scale: float | None = None,  # factor of the sum
        backend: Backend | None = None,  # default: the device's
        topology: Topology | None = None,  # default: discovered from the hosts of the ranks
        activity: Activity | None = None,  # of a trainer; None: only backward is visible
        exit_reporter: ExitReporter | None = None,
        noise_every: int = 0,  # steps between measurements of the noise scale, with each rank as a microbatch
    ) -> None:
        self.settings, self.device, self.scale, self.pid = settings, device, scale, os.getpid()
        self.layouts = BucketLayouts(model)
        self.summed_elements = 0  # by the latest backward
        self.activity = activity = activity or Activity(settings.timeout_s, is_followed=False)
        with ExitStack() as stack, on_device(device):
            groups = stack.enter_context(closing(Groups(group, device, activity.patience_s, backend, topology)))
            self.topology = groups.topology
            on_accelerators = device.type != "cpu"
            self.plans = PlansInUse(
                settings, self.topology.shape, self.has_room(groups), on_accelerators, tunes, self.layouts.has_16_bits
            )
            groups.open(self.plans.axes)
            self.timeline = Timeline(groups.rank, ALL_STEPS if settings.timeline else NO_STEPS)
            times = StreamTimes(device, self.timeline) if on_accelerators else None
            self.progress = BackwardProgress(self.layouts, times)
            watchdog = Watchdog(
                groups.store,
                groups.rank,
                groups.names,
                activity,
                self.progress,
                exit_reporter or ExitReporter(groups.names[groups.rank]),
                groups.set_timeout,
            )
            self.failure = FailureHandler(groups, self.layouts, stack.enter_context(closing(watchdog)))
            self.reducer: Reducer | StreamReducer
            if times:
                self.reducer = StreamReducer(groups, self.failure, times)
            else:
                self.reducer = Reducer(groups, self.failure, self.timeline)
            stack.enter_context(closing(self.reducer))
            num_ranks = self.topology.num_ranks
            self.noise = RankNoise(noise_every, num_ranks, device, self.sum_noise) if noise_every else None
            self.stack = stack.pop_all()

    def has_room(self, groups: Groups) -> bool:
        """Return True if shared memory fits the gradients of a node's ranks twice, because DDP rebuilds its buckets."""
        if groups.shareable_bytes is None:
            return False
        num_bytes = 2 * groups.topology.shape.largest_node * self.layouts.num_bytes
        if num_bytes <= groups.shareable_bytes:
            return True
        if groups.rank == 0:
            warnings.warn(
                f"/dev/shm has {groups.shareable_bytes:,} bytes left, gradients need {num_bytes:,}; they are reduced "
                "through sockets, which is slower: enlarge /dev/shm (docker: --shm-size)",
                stacklevel=2,
            )
        return False

    def tune(self, backward: RecordedBackward, stored: Tuning | None) -> Tuning:
        """Choose buckets and plans for these gradients, or use the stored ones if they fit.  All ranks call it."""
        with on_device(self.device):
            if stored and is_made_for(stored, self.topology, backward, self.plans.candidates):
                if self.topology.num_nodes > 1:  # on one node, no choice depends on the links
                    self.plans.drift = measure_drift(self.reducer, stored, self.settings)
            else:
                self.plans.is_rechosen = stored is not None
                stored = tune(self.reducer, self.plans.candidates, backward, self.settings)
            self.plans.tuning = stored
            self.reducer.groups.close_others(self.plans.axes)
        return stored

    @property
    def plan(self) -> Plan:
        """The plan of every bucket without a tuning.  With `attach`, these are all buckets."""
        return self.plans.default

    @property
    def waited_s(self) -> float:
        """Total time waiting for other ranks and the network.  On accelerators, only that of completed collectives."""
        return self.reducer.waited_s

    @property
    def num_steps(self) -> int:
        """Number of steps since the start of the run whose gradients were, or are being, all-reduced."""
        return self.progress.step

    def count_from(self, step: int) -> None:
        """Set the step of the next backward, counted from 0.  Messages count from 1."""
        self.progress.step, self.progress.first_step = step, 1

    def take_finite(self) -> bool:
        """Return True if all gradients of the last backward are known to be finite.

        Only ranks of a single node check, while they sum, and only after the first call.
        """
        runner = self.reducer.runner
        summed, finite = self.summed_elements, runner.finite_elements
        self.summed_elements = runner.finite_elements = 0
        runner.checks = True
        return 0 < summed == finite

    def start_metrics(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start the all-reduce of a small tensor beside the buckets, without rounding.  Always pass the same tensor."""
        header = BarrierHeader(self.progress.step, STEP_METRICS)
        return self.reducer.start(STEP_METRICS, tensor, self.plans.exact, header, None, is_last=False)

    def sum_noise(self, tensor: torch.Tensor) -> None:
        """Sum a small tensor over the ranks after backward, without rounding.  Always pass the same tensor."""
        header = BarrierHeader(self.progress.step - 1, NOISE)
        self.reducer.start(NOISE, tensor, self.plans.exact, header, None, is_last=True).wait()

    def start_bucket(self, bucket: "dist.GradBucket") -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        index, tensor, is_last = bucket.index(), bucket.buffer(), bucket.is_last()
        header = BarrierHeader(self.progress.step, index, self.layouts.layout_hash(bucket, tensor))
        plan = self.plans.plan_of(index, tensor.numel())
        self.summed_elements += tensor.numel()
        if self.noise:
            self.noise.note(self.progress.step, tensor)
        future = self.reducer.start(index, tensor, plan, header, self.scale, is_last)
        self.activity.bucket_is_ready(is_last)
        self.progress.bucket_has_started(index, future, is_last)
        if is_last:
            queue_callback(lambda: self.end_backward(future))
        return future

    def end_backward(self, last: torch.futures.Future[torch.Tensor]) -> None:
        last.wait()  # on accelerators the stream waits, not the host
        if self.noise:
            self.noise.end_backward()
        self.raise_error()

    def noise_scale(self, samples_per_rank: int) -> NoiseRecord | None:
        """Return the gradient noise scale of a script, in samples; None before the first measured step.

        The host waits for the device. Each rank must have the same number of samples in every step.
        """
        if self.noise is None:
            raise UserError("the noise scale is not measured; call attach with noise_every, for example noise_every=20")
        return self.noise.scale(samples_per_rank)

    def raise_error(self) -> None:
        """Raise the first error of this rank's all-reduces, if any.

        Also call it after the host has waited for the device: an aborted all-reduce leaves invalid values.
        """
        self.failure.raise_error()

    def close(self) -> None:
        """Stop the threads and close the groups of this all-reduce.  Later backward passes raise a UserError.

        In a process that was forked from the rank, do nothing.
        """
        if os.getpid() == self.pid:  # a forked process must not close the groups of its parent
            atexit.unregister(self.close)
            with on_device(self.device):
                self.stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, GeneratorExit):  # which only closes a generator that trains
            self.failure.leave(error)
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Detached, (self.settings,)


class Detached(NamedTuple):
    """The pickled form of a model's all-reduce.  A loaded model uses DDP's until `attach` is called again."""

    settings: CommSettings
