"""All names of torch that megabatch uses and that are private or differ between versions, with the reason for each.

A private name may change in any release of torch.  So no other file of the package uses one, and
tests/test_torch_api.py tests each name here.  Aliases are torch's objects, so a call has no overhead.
"""

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from importlib.abc import MetaPathFinder
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

# Operations on lists of tensors, as in torch.optim.  A loop would launch a kernel per tensor on an accelerator.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_
foreach_zero_ = torch._foreach_zero_
# Momentum SGD in one pass over memory.  torch.optim.SGD(fused=True) has one learning rate per group, but LARS has one
# per tensor.
fused_sgd_ = torch._fused_sgd_
# Adam's update in one pass over memory.  LAMB needs it as a tensor; torch.optim.AdamW adds it to the weights.
fused_adamw_ = torch._fused_adamw_
# The kernels of torch.amp.GradScaler.  GradScaler lets the scale fall below 1 and synchronizes with the host.
unscale_and_find_inf_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_
# torch.optim groups tensors with this C++ function at every step, since any tensor may lack a gradient.
group_by_device_and_dtype: Callable[[Any], dict[Any, Any]] = torch.optim.Optimizer._group_tensors_by_device_and_dtype
# F.interpolate(antialias=True) calls it, but has no `out` and would allocate memory for every image.
resize_antialiased: Any = torch._C._nn._upsample_bilinear2d_aa

# The base classes of all BatchNorm and InstanceNorm layers; torch has no public one.
NormBase = batchnorm._NormBase
BatchNormBase = batchnorm._BatchNorm
# Tensors without data that have a device: autocast has no effect on the public meta device.
FakeTensorMode = fake_tensor.FakeTensorMode


@contextmanager
def silent_fake_tensors() -> Iterator[None]:
    """Do not log the traceback of every error on fake tensors before it is raised."""
    before = fake_tensor.log.disabled
    fake_tensor.log.disabled = True  # torch sets its level again when it compiles
    try:
        yield
    finally:
        fake_tensor.log.disabled = before


# A unique number of each storage.  The public data_ptr() is 0 for empty storages, and fake ones have none.
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# Moves a storage to shared memory, and returns the file descriptor and the number of bytes.  The public share_memory_()
# returns no descriptor for other processes to map.
share_by_descriptor: Callable[[torch.UntypedStorage], tuple[int, int]] = torch.UntypedStorage._share_fd_cpu_
# Runs a function at the end of the backward pass, as in DDP; there is no public hook for it.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

# The store of the default process group, through which ranks connect additional groups.
default_store: Callable[[], Any] = distributed_c10d._get_default_store
# Before torch 2.13 it is called all_gather_into_tensor, which is deprecated in 2.13.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Aborts the process groups of torch.distributed, in one NCCL group so that none waits for another.
abort_process_groups: Callable[[], None] = distributed_c10d._abort_process_group
# The key that NCCL's watchdog sets when an operation fails, in the store without prefixes.  A rank that finds it ends
# eight minutes later, also after a restart.
NCCL_DUMP_KEY = "exception_dump"
# Methods of a process group.  The functions of torch.distributed accept only groups from dist.new_group.
ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "_allgather_base", "_reduce_scatter_base", "alltoall_base"


def has_context(index: int) -> bool:
    """Return whether this process has a CUDA context on the device.  The public functions would make one."""
    of_cuda: Any = torch._C  # a CPU build lacks the function
    return bool(of_cuda._cuda_hasPrimaryContext(index))


def multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for products of bf16.  torch emulates them, many times slower."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


SUPPORTS_FOUND_INF = "_step_supports_amp_scaling"  # GradScaler reads this: the optimizer's step checks `found_inf`

# The errors of torch.compile have no common base class.  They are defined in these modules or raised through this file.
COMPILER_MODULES = ("torch._inductor", "torch._dynamo", "torch._functorch")
COMPILER_FILE = "torch/_dynamo/convert_frame.py"
NO_CXX, NO_TRITON = "InvalidCxxCompiler", "TritonMissing"  # two of these errors


class CompilerPart(ModuleType):
    """A module of torch.compile that is imported when an attribute other than the given ones is used."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect reads such attributes of all modules
            raise AttributeError(name)
        return getattr(import_compiler(self.__name__), name)


EXCLUDED: list[Any] = []  # functions to exclude from compilation


def postpone_compiler() -> None:
    """Postpone the import of torch._dynamo, which takes a second of a core and 70 MB per rank, until it is used.

    torch.optim and DDP import it although they only exclude their own functions from compilation, and DDP reads a
    setting and joins the default process group.
    """

    def disable(function: Any, *arguments: Any, **options: Any) -> Any:
        EXCLUDED.append(function)
        return function

    if "torch._dynamo" in sys.modules:
        return
    utils = CompilerPart("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the default
    rules = CompilerPart("torch._dynamo.trace_rules", clear_lru_cache=lambda: None)
    parts = {"disable": disable, "graph_break": lambda *arguments: None, "utils": utils, "trace_rules": rules}
    torch._dynamo = sys.modules["torch._dynamo"] = CompilerPart("torch._dynamo", **parts)


def import_compiler(name: str) -> ModuleType:
    """Import the module in place of the CompilerPart, and forget the functions that were to be excluded."""
    if isinstance(sys.modules["torch._dynamo"], CompilerPart):
        del sys.modules["torch._dynamo"], torch._dynamo
        while EXCLUDED:
            vars(EXCLUDED.pop()).pop("__dynamo_disable", None)  # torch stores the result of `disable` there
    return importlib.import_module(name)


def is_refused_view(error: BaseException) -> bool:
    """Return whether the error is that of `x.view(len(x), -1)` for a tensor that is not contiguous."""
    return "view size is not compatible with input tensor's size and stride" in str(error)


def nondeterministic_operation(error: BaseException | None) -> str | None:
    """Return the operation that torch refused as not deterministic; None for any other error."""
    while error is not None:
        operation, separator, _ = str(error).partition(" does not have a deterministic implementation")
        if separator:
            return operation.split()[-1]
        error = error.__cause__
    return None


def refused_global(error: BaseException) -> str | None:
    """Return the name in a pickle that torch.load(weights_only=True) refused to import, if the error has one."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else None


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step changes nothing if its `found_inf` is 1."""
    return bool(getattr(optimizer, SUPPORTS_FOUND_INF, False))


def declare_found_inf_support(optimizer: torch.optim.Optimizer) -> None:
    """Stop GradScaler from reading `found_inf` on the host before this optimizer's step."""
    setattr(optimizer, SUPPORTS_FOUND_INF, True)


def forward_hooks(module: nn.Module) -> Iterable[dict[int, Any]]:
    """Return the forward pre-hooks and hooks of the module. The public handles do not apply to a copy of the module."""
    return module._forward_pre_hooks, module._forward_hooks


def nccl_backend() -> str:
    """Return the name of the backend ProcessGroupNCCL, the class of all our groups.

    It is "nccl-legacy" since torch 2.14.  There "nccl" means ProcessGroupNCCL2 if TORCH_DIST_USE_NCCL2=1, and from 2.15
    on by default.
    """
    return "nccl-legacy" if hasattr(distributed_c10d, "_register_builtin_nccl_legacy_backend") else "nccl"


def default_backend_class(device: torch.device) -> str:
    """Return the class of the default process group's backend, which several names have in common."""
    whole: Any = dist.group.WORLD
    return type(whole._get_backend(device)).__name__


def nccl_options(timeout: timedelta) -> Any:
    """Return the options of an NCCL process group with this timeout, which its constructor does not accept.

    NCCL's kernels run on the group's own stream. The priority of the stream that starts them has no effect.  With high
    priority a bucket's all-reduce gets its few blocks as soon as any of backward's blocks end.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def nccl_to_split(group: Any, device: torch.device) -> Any:
    """Return the NCCL backend of a process group if its communicator can be split, or None.

    It exists from the start only if the group is bound to a device.  Otherwise the first collective creates it.
    """
    if group.bound_device_id != device:
        return None
    backend = group._get_backend(device)
    return backend if isinstance(backend, dist.ProcessGroupNCCL) and backend.supports_splitting else None


def split_nccl_group(
    whole: Any, color: int, device: torch.device, store: Any, index: int, size: int, timeout: timedelta
) -> Any:
    """Return a process group whose communicator is split off that of `whole`, as torch does for its own groups.

    torch's functions split only for groups that they create and register.
    """
    options = nccl_options(timeout)
    options.split_from, options.split_color = whole, color
    group: Any = dist.ProcessGroupNCCL(store, index, size, options)
    group.eager_connect_single_device(device)  # by default, at its first collective
    return group


def leave_nccl_split(whole: Any, device: torch.device) -> None:
    """Take part in a split without a color: ncclCommSplit waits for every rank of `whole`."""
    whole.perform_nocolor_split(device)


def pin_in_place(tensor: torch.Tensor) -> bool:
    """Pin memory that torch did not allocate, so that copies from it do not block; return False if that is impossible.

    Tensor.pin_memory copies.  The functions of CUDA (and of ROCm, under the same name) are public in torch.cuda, but
    only builds with CUDA have them.
    """
    size = tensor.untyped_storage().nbytes()
    is_pinned = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)) == 0
    if not is_pinned:
        with suppress(RuntimeError):  # the next launch of this thread reports the error again, and clears it
            torch.ones(1, device="cuda")
    return is_pinned


def unpin(tensor: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class NoRuntimeStatistics:
    """DDP's logger without the times of each pass, for which the host would wait for the device."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def set_runtime_stats_and_log(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logger, name)


def stop_runtime_statistics(model: DistributedDataParallel) -> None:
    model.logger = NoRuntimeStatistics(model.logger)


def disable_buffer_broadcast(model: DistributedDataParallel) -> None:
    """Stop DDP from overwriting buffers with rank 0's in every forward pass.

    The argument of DDP is broadcast_buffers before torch 2.13 and forward_sync_buffers since, with a warning for the
    old name.  The attribute has the old name in all versions.
    """
    model.broadcast_buffers = False


def bucket_caps_bytes(model: DistributedDataParallel) -> list[int]:
    """Return the bucket sizes that were passed to DDP: one per bucket, or one for all."""
    return model.bucket_bytes_cap_list or [model.bucket_bytes_cap]


def split_compiled_graphs(model: DistributedDataParallel, num_bytes: int) -> None:
    """Make torch.compile split the graph of a DDP model about every `num_bytes` of gradients.

    DDP does not read this attribute after it has created its buckets.
    """
    model.bucket_bytes_cap = num_bytes


class OperatorDefiner(MetaPathFinder):
    """An import hook that defines torchvision's operators if its compiled extension did not. It finds no module.

    Most torchvision wheels are built for CUDA, and their extension does not load with a CPU build of torch.  The import
    of torchvision fails only when it registers metadata of two operators of the extension, which then do not exist.  So
    they are defined here, without a kernel, after torchvision has tried to load the extension.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torchvision._meta_registrations":
            for name in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, name):
                    torchvision_operators().define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@cache
def torchvision_operators() -> torch.library.Library:
    """Return the library of the operators defined here, which exist as long as the library."""
    return torch.library.Library("torchvision", "FRAGMENT")


def lacks_extension() -> bool:
    """Return whether torchvision was imported and could not load its compiled extension."""
    extension = sys.modules.get("torchvision.extension")
    return extension is not None and not extension._has_ops()


def allow_torchvision_without_extension() -> None:
    """Allow the import of torchvision even if its compiled extension does not load."""
    if not any(isinstance(finder, OperatorDefiner) for finder in sys.meta_path):
        sys.meta_path.insert(0, OperatorDefiner())


def missing_operator(error: BaseException) -> str | None:
    """Return the operator of torchvision that the error is about, if torchvision's compiled extension did not load."""
    if not lacks_extension():
        return None
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "_assert_has_ops" in functions:  # torchvision's functions have the names of their operators and call it first
        return functions[functions.index("_assert_has_ops") - 1]
    called = re.search(r"torchvision::(\w+)|'torchvision' object has no attribute '(\w+)'", str(error))
    return called[1] or called[2] if called else None
