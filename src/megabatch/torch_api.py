"""The names of torch that are private or differ between its versions: all that megabatch uses, and why.

A private name may change in any release of torch.  So no other file of the package uses one, and
tests/test_torch_api.py has a test of each name here.  Aliases are torch's own objects: a call costs what torch's costs.
"""

import re
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from importlib.abc import MetaPathFinder
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

# Lists of tensors.  torch.optim uses these; a loop over tensors takes a launch for each, on an accelerator.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_
# Momentum SGD in one pass over memory.  torch.optim.SGD(fused=True) calls it with one learning rate for a whole group,
# and LARS has one per tensor.
fused_sgd_ = torch._fused_sgd_
# torch.amp.GradScaler's kernels.  GradScaler itself lets the scale fall below 1, and asks the host.
unscale_and_find_inf_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_
# torch.optim groups tensors by this, in C++: at every step, since any of them may have no gradient.
group_by_device_and_dtype: Callable[[Any], dict[Any, Any]] = torch.optim.Optimizer._group_tensors_by_device_and_dtype
# F.interpolate(antialias=True) calls it, and takes no `out`: it would allocate memory for every image.
resize_antialiased: Any = torch._C._nn._upsample_bilinear2d_aa

# The base classes of all BatchNorm and InstanceNorm layers; torch has no public one.
NormBase = batchnorm._NormBase
BatchNormBase = batchnorm._BatchNorm
# Tensors without content that keep their device: autocast does nothing on torch's public meta device.
FakeTensorMode = fake_tensor.FakeTensorMode

# A number for each storage.  The public data_ptr() is 0 for all empty ones, and fake ones have none.
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
# Moves a storage into shared memory, and returns the file descriptor and the number of bytes.  The public
# share_memory_() does not return a descriptor that another process could map.
share_by_descriptor: Callable[[torch.UntypedStorage], tuple[int, int]] = torch.UntypedStorage._share_fd_cpu_
# Runs a function at the end of the backward pass, as DDP does; no public hook runs then.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

# The store of the default process group, where the ranks find each other again for groups of ours.
default_store: Callable[[], Any] = distributed_c10d._get_default_store
# Before torch 2.13 it is called all_gather_into_tensor, a name that 2.13 warns of.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Methods of a process group.  torch.distributed's functions take only groups that dist.new_group has made.
ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "_allgather_base", "_reduce_scatter_base", "alltoall_base"

HEEDS_FOUND_INF = "_step_supports_amp_scaling"  # an optimizer's promise to GradScaler: its step looks at `found_inf`

# torch.compile has no common base class of its errors.  They are defined in these modules, or pass through this file.
COMPILER_MODULES = ("torch._inductor", "torch._dynamo", "torch._functorch")
COMPILER_FILE = "torch/_dynamo/convert_frame.py"
NO_CXX, NO_TRITON = "InvalidCxxCompiler", "TritonMissing"  # two of these errors


def heeds_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step leaves everything as it is if its `found_inf` is 1, as GradScaler asks."""
    return bool(getattr(optimizer, HEEDS_FOUND_INF, False))


def promise_to_heed_found_inf(optimizer: torch.optim.Optimizer) -> None:
    """Tell GradScaler that it need not read `found_inf` on the host before this optimizer's step."""
    setattr(optimizer, HEEDS_FOUND_INF, True)


def forward_hooks(module: nn.Module) -> Iterable[dict[int, Any]]:
    """Return the hooks before and after the module's forward: the public handles are lost in a copy of the module."""
    return module._forward_pre_hooks, module._forward_hooks


def nccl_options(timeout: timedelta) -> Any:
    """Return the options of a NCCL process group with this timeout, which its constructor does not take."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


class NoRuntimeStatistics:
    """DDP's logger without its times of single passes: to read those, the host waits for the device."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def set_runtime_stats_and_log(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logger, name)


def stop_runtime_statistics(model: DistributedDataParallel) -> None:
    model.logger = NoRuntimeStatistics(model.logger)


def keep_own_buffers(model: DistributedDataParallel) -> None:
    """Stop DDP from overwriting buffers with rank 0's in every forward pass.

    The argument for this is called broadcast_buffers before torch 2.13 and forward_sync_buffers since; torch warns of
    the older one there.  The attribute has the older name in all versions.
    """
    model.broadcast_buffers = False


def bucket_caps_bytes(model: DistributedDataParallel) -> list[int]:
    """Return the sizes of DDP's buckets as it was given them: a size for each, or one for all."""
    return model.bucket_bytes_cap_list or [model.bucket_bytes_cap]


def cut_compiled_graphs(model: DistributedDataParallel, num_bytes: int) -> None:
    """Let torch.compile cut the graph of a DDP model about every `num_bytes` of gradients.  DDP itself does not read
    this attribute after it has made its buckets."""
    model.bucket_bytes_cap = num_bytes


class OperatorDefiner(MetaPathFinder):
    """Defines the operators that torchvision describes on import, if its extension did not.  It finds no module.

    Most wheels of torchvision are built for CUDA.  Beside a CPU build of torch the compiled extension does not load.
    torchvision tolerates that until it describes two operators of the extension: they do not exist, and its import
    fails.  So they are defined here, without a kernel, after torchvision has tried to load the extension.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torchvision._meta_registrations":
            for name in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, name):
                    torchvision_operators().define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@cache
def torchvision_operators() -> torch.library.Library:
    """Return the library of the operators defined here, which exist as long as it does."""
    return torch.library.Library("torchvision", "FRAGMENT")


def lacks_extension() -> bool:
    """Return whether torchvision has been imported and could not load its compiled extension."""
    extension = sys.modules.get("torchvision.extension")
    return extension is not None and not extension._has_ops()


def allow_torchvision_without_extension() -> None:
    """Let torchvision and its users be imported from here on even if its compiled extension does not load."""
    if not any(isinstance(finder, OperatorDefiner) for finder in sys.meta_path):
        sys.meta_path.insert(0, OperatorDefiner())


def missing_operator(error: BaseException) -> str | None:
    """Return the operator of torchvision that the error is about, if torchvision's compiled extension did not load."""
    if not lacks_extension():
        return None
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "_assert_has_ops" in functions:  # torchvision's functions call it first, and are named as their operators
        return functions[functions.index("_assert_has_ops") - 1]
    called = re.search(r"torchvision::(\w+)|'torchvision' object has no attribute '(\w+)'", str(error))
    return called[1] or called[2] if called else None
