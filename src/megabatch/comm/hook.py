"""DDP's communication hook: buckets go to the reducer as backward fills them, and are summed underneath it.

    megabatch.comm.attach(ddp_model)        one line in a script that has DistributedDataParallel already
    distribute(model, ...)                  what our own trainer does

An error in the hook or its threads would reach the user as a cast error of DDP's; so it is kept, and raised as itself
by a callback at the end of backward.
"""

import atexit
import hashlib
import json
import os
import re
import time
import warnings
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.barrier import Header, MissingRank, RankMismatch, name_bucket
from megabatch.comm.groups import Groups
from megabatch.comm.reducer import Reducer, Work
from megabatch.comm.settings import CommSettings, candidate_plans, choose_plan
from megabatch.comm.tune import Backward, axes_of, measure_drift, tune
from megabatch.comm.watchdog import WAITS, Watchdog
from megabatch.errors import UserError
from megabatch.planning.buckets import Gradient
from megabatch.planning.plan import Plan, Wire
from megabatch.planning.topology import Axis
from megabatch.planning.tuning import Tuning
from megabatch.ranks.world import World

MESSAGE = -1  # the key of what is summed beside the buckets


class Layout(NamedTuple):
    storage: torch.UntypedStorage  # kept, so that no other bucket is taken for this one
    text: str  # names, types, shapes and strides, in their order
    number: int  # a hash of the text
    parameters: list[nn.Parameter]


class GradientSums:
    """The sums of one model's gradients.  Close it when no backward will follow; a `with` does."""

    def __init__(
        self, model: nn.Module, group: Any, device: torch.device, settings: CommSettings, tunes: bool = False
    ) -> None:
        self.settings = settings
        self.tuning: Tuning | None = None  # until `tune` or `use`, and always if `tunes` is false, one plan for all
        self.drift = 1.0  # see planning.tuning.drift
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.layouts: dict[int, Layout] = {}  # of the buckets that have been seen
        self.reduced: set[int] = set()  # buckets of this step
        self.step = 0
        self.last: torch.futures.Future[torch.Tensor] | None = None  # bucket of the newest step that is complete here
        self.ready_s = 0.0  # when the newest bucket was ready: from the last one on, backward waits for other ranks
        self.scale: float | None = None
        self.pid = os.getpid()
        with ExitStack() as stack:
            self.groups = groups = stack.enter_context(closing(Groups(group, device, settings.timeout_s)))
            self.topology = groups.topology
            in_memory = self.has_room(groups)
            self.plan = choose_plan(settings, groups.topology, in_memory)
            self.message_plan = choose_plan(settings.exactly(), groups.topology, in_memory)
            self.candidates = (
                candidate_plans(settings, groups.topology, in_memory, device.type == "cuda") if tunes else [self.plan]
            )
            groups.open(axes_of([self.plan, self.message_plan, *self.candidates]))
            self.watchdog = stack.enter_context(
                closing(Watchdog(groups.store, groups.rank, groups.names, settings.timeout_s, self.state))
            )
            self.reducer = Reducer(groups, self.explain)
            self.stack = stack.pop_all()

    def has_room(self, groups: Groups) -> bool:
        """True if the gradients of all ranks of a host fit into its memory, twice: DDP makes its buckets anew."""
        if groups.shareable_bytes is None:
            return False
        num_bytes = 2 * groups.topology.largest_node * sum(p.numel() * p.element_size() for p in self.parameters)
        if num_bytes <= groups.shareable_bytes:
            return True
        if groups.rank == 0:
            warnings.warn(
                f"/dev/shm has {groups.shareable_bytes:,} bytes left, gradients need {num_bytes:,}; they are summed "
                "through sockets, which is slower: make it larger (docker: --shm-size)",
                stacklevel=2,
            )
        return False

    def tune(self, backward: Backward) -> Tuning:
        """Chooses fusion and plans for these gradients; all ranks call it."""
        self.tuning = tune(self.reducer, self.candidates, backward, self.settings)
        return self.tuning

    def use(self, stored: Tuning) -> Tuning:
        """Takes what was chosen before, and looks how it would fare now; all ranks call it."""
        self.tuning = stored
        if self.topology.num_nodes > 1:  # elsewhere there is no choice
            self.drift = measure_drift(self.reducer, stored, self.settings)
        return stored

    @property
    def algorithms(self) -> str:
        """The names of the plans in use."""
        return self.tuning.algorithms if self.tuning else self.plan.name

    def plan_of(self, index: int, num_elements: int) -> Plan:
        """Before DDP has made its final buckets, after the first backward, they are not those of the tuning."""
        buckets = self.tuning.buckets if self.tuning else []
        is_tuned = index < len(buckets) and buckets[index].num_elements == num_elements
        return buckets[index].plan if is_tuned else self.plan

    @property
    def waited_s(self) -> float:
        """For other ranks and the network, in all.  The straggler waits least; no clocks are compared."""
        return sum(list(self.reducer.waits_s.values()))

    def start_sum(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Sums a small tensor beside the buckets, exactly: no 16 bits on the wire.  Always the same tensor."""
        return self.reducer.start(MESSAGE, tensor, self.message_plan, Header(self.step, MESSAGE), None, is_last=False)

    def reduce(self, bucket: "dist.GradBucket") -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        self.ready_s = time.perf_counter()
        self.watchdog.see_progress()
        index, tensor, is_last = bucket.index(), bucket.buffer(), bucket.is_last()
        header = Header(self.step, index, self.layout(bucket, tensor))
        plan = self.plan_of(index, tensor.numel())
        future = self.reducer.start(index, tensor, plan, header, self.scale, is_last)
        self.reduced.add(index)
        if is_last:
            self.last = future
            self.step += 1
            self.reduced = set()
            Variable._execution_engine.queue_callback(lambda: self.end_backward(future))
        return future

    def layout(self, bucket: "dist.GradBucket", tensor: torch.Tensor) -> int:  # type: ignore[name-defined]
        """A hash of what lies where in the bucket; made when DDP has made the bucket."""
        known = self.layouts.get(bucket.index())
        if known is None or known.storage._cdata != tensor.untyped_storage()._cdata:
            parameters = bucket.parameters()
            # DDP lays a gradient out like its parameter; `bucket.gradients()` shows all of them contiguous.
            text = json.dumps([(self.names.get(id(p)), str(p.dtype), p.shape, p.stride()) for p in parameters])
            number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
            known = Layout(tensor.untyped_storage(), text, number, parameters)
            self.layouts[bucket.index()] = known
        return known.number

    def end_backward(self, last: torch.futures.Future[torch.Tensor]) -> None:
        last.wait()
        if self.reducer.error is not None:
            raise self.reducer.error

    def state(self) -> str:
        """What this rank lacks, for the ranks that wait for it."""
        if self.last is not None and not self.last.done():
            return WAITS
        reduced = {id(parameter) for index in list(self.reduced) for parameter in self.layouts[index].parameters}
        to_reduce = [parameter for parameter in self.parameters if id(parameter) not in reduced]
        # Gradients of the last step may still be there.
        missing = [self.names[id(p)] for p in [p for p in to_reduce if lacks_gradient(p)] or to_reduce]
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return f"has reduced {len(self.reduced)} buckets of step {self.step} and has no gradient yet of {some}"

    def explain(self, error: BaseException, work: Work, axis: Axis) -> BaseException:
        """This rank gives up, and tells the others; its error, with what they have told."""
        if type(error) is RuntimeError:  # the engine's only one: it knows no ranks
            # [/source/file.cc:553] Connection closed by peer. Explanations.
            line = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
            error, knows_rank = MissingRank(f"the network says: {line}"), False
        else:
            line, knows_rank = str(error), True
        # Who misses others is not the cause.
        self.watchdog.give_up(WAITS if isinstance(error, MissingRank) else f"has given up: {line}")
        self.groups.abandon()
        said = [f"step {work.header.step}, {name_bucket(work.key)}: {error}"]
        if isinstance(error, RankMismatch):
            layout = self.layouts.get(work.key)
            members = self.groups.topology.members(axis, self.groups.rank)
            said += self.watchdog.differences(layout.text if layout else "[]", members)
        elif isinstance(error, MissingRank):
            said += self.watchdog.told(waits_for_all=not knows_rank)
        return type(error)("; ".join(said)) if isinstance(error, RuntimeError) else error

    def close(self) -> None:
        if os.getpid() == self.pid:  # a forked process must not speak for its parent
            atexit.unregister(self.close)
            self.reducer.close()
            self.stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and error is not self.reducer.error:
            self.watchdog.give_up(f"has given up: {type(error).__name__}: {error}")
        self.close()


def sum_bucket(
    sums: GradientSums,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook, as DDP wants it: a function of a state and a bucket."""
    return sums.reduce(bucket)


def lacks_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is None or not bool(parameter.grad.count_nonzero())


def distribute(
    model: nn.Module,
    world: World,
    settings: CommSettings,
    backward: Backward | None = None,
    stored: Tuning | None = None,
) -> tuple[DistributedDataParallel, GradientSums]:
    """Wraps a model so that backward leaves the sum over ranks in the gradients.  DDP would average; our losses are
    divided by the global batch already.

    Fusion and plans are those of `stored`, where these are the ranks and gradients that it was made for; otherwise they
    are chosen here, for a recorded backward pass or else for gradients that are all ready at once.
    """
    sums = GradientSums(model, dist.group.WORLD, world.device, settings, tunes=True)
    world.closing.enter_context(sums)
    backward = backward or ready_at_once(model)
    tuning = sums.use(stored) if stored and is_made_for(stored, sums, backward) else sums.tune(backward)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # The trainer keeps BatchNorm's statistics equal on all ranks itself; DDP would overwrite them with rank 0's.
        forward_sync_buffers=False,
        bucket_cap_mb_list=tuning.caps_mb,  # type: ignore[arg-type]  # whole or not
    )
    wrapped.register_comm_hook(sums, sum_bucket)
    return wrapped, sums


def ready_at_once(model: nn.Module) -> Backward:
    """In the order in which DDP expects them."""
    named = [(name, p) for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    return Backward([name for name, _ in named], [gradient_of(p) for _, p in named], [0.0] * len(named))


def gradient_of(parameter: nn.Parameter) -> Gradient:
    return Gradient(parameter.numel() * parameter.element_size(), str(parameter.dtype))


def is_made_for(tuning: Tuning, sums: GradientSums, backward: Backward) -> bool:
    sizes = dict(zip(backward.names, backward.gradients, strict=True))
    fits = [
        [sizes.get(name, Gradient(0, "")).dtype for name in bucket.gradients] == [bucket.dtype] * len(bucket.gradients)
        and sum(sizes[name].num_bytes for name in bucket.gradients) == bucket.num_bytes
        for bucket in tuning.buckets
    ]
    names = [name for bucket in tuning.buckets for name in bucket.gradients]
    can_run = all(bucket.plan in sums.candidates for bucket in tuning.buckets)
    return can_run and tuning.topology == sums.topology and all(fits) and sorted(names) == sorted(sizes)


def attach(
    model: DistributedDataParallel,
    *,
    algorithm: str = "auto",
    wire: Wire = "fp32",
    timeout_s: float = 600.0,
    loss_is_scaled: bool = False,
) -> GradientSums:
    """Gives megabatch's all-reduce to a DistributedDataParallel model; gradients are averaged, as DDP does.

    Call it on every rank, once, before the first backward.  `wire="bf16"` halves the bytes between hosts; "fp16" too,
    but small gradients vanish in it unless the loss is scaled (torch.amp.GradScaler): then say `loss_is_scaled=True`.
    """
    if wire == "fp16" and not loss_is_scaled:
        raise UserError("wire='fp16' loses small gradients unless the loss is scaled; nearest: wire='bf16'")
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UserError(f"{name} has sparse gradients, which have no place in a bucket; nearest: sparse=False")
    settings = CommSettings(algorithm=algorithm, wire=wire, timeout_s=timeout_s)
    device = next(parameter.device for parameter in model.parameters() if parameter.requires_grad)
    with ExitStack() as stack:
        sums = stack.enter_context(GradientSums(model.module, model.process_group, device, settings))
        sums.scale = 1 / dist.get_world_size(model.process_group)
        model.register_comm_hook(sums, sum_bucket)
        atexit.register(sums.close)
        stack.pop_all()
    return sums
