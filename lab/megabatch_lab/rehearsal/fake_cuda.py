"""A fake CUDA, to run the GPU path without a GPU on a CPU or CUDA build of torch.  See fake_cuda.cpp.

    fake_cuda.install()                        # once per process, before any use of CUDA
    fake_cuda.reset()
    ...                                        # code that uses "cuda" tensors, streams and events
    fake_cuda.launches()                       # Counter by operation
    fake_cuda.seen("sync")                     # waits for the device, each with the line of megabatch that caused it

It cannot show the asynchrony, cuDNN, NCCL, memory limits and speed of a real device.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch

import megabatch

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("fake_cuda.cpp", "memory.h", "device.h", "ordering.h")]
BUILT = Path.home() / ".cache" / "megabatch" / "rehearsal"  # shared by all checkouts; tests set XDG_CACHE_HOME
TORCH = Path(torch.__file__).parent
OPTIONS = ["-O1", "-fPIC", "-shared", "-std=c++20", "-w"]
PACKAGE = f"{Path(megabatch.__file__).parent}/"
LAG = 20  # launches after which a recorded event is complete
NUM_DEVICES = int(os.environ.get("FAKE_CUDA_DEVICES", "8"))
HAS_GPU = torch.cuda.is_available()  # read before `install`, which makes it True

Report = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Seen(NamedTuple):
    """A sync, hazard, copy or record_stream; inside `traced`, also a launch or allocation."""

    kind: str
    name: str  # the number of bytes for an allocation
    device: int
    stream: int  # 0 is the default stream
    where: str  # file:line of the innermost megabatch frame
    thread: str


reports: list[Seen] = []
copied_where: dict[int, str] = {}  # by the number of the copy
debug = SimpleNamespace(mode="default")  # of torch.cuda.set_sync_debug_mode
callbacks: list[Any] = []  # keeps the callbacks of C++ alive


def why_not() -> str | None:
    """Return the reason why the fake CUDA cannot be used here, or None."""
    if torch.version.hip:
        return "needs a CPU or CUDA build of torch: this one is for ROCm"
    if HAS_GPU:
        return "needs a machine without a GPU: hide it with CUDA_VISIBLE_DEVICES="
    return None if shutil.which("g++") else "needs g++: install it"


def build() -> Path:
    """Compile the library unless it exists, and return its path.  Other processes wait for the first."""
    content = b"".join(source.read_bytes() for source in SOURCES)
    key = hashlib.sha256(content + f"{torch.__version__} {OPTIONS}".encode()).hexdigest()[:16]
    library = BUILT / f"fake_cuda-{key}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            new = library.with_suffix(f".{os.getpid()}")
            headers = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
            libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}"]
            subprocess.run(["g++", *OPTIONS, *headers, str(SOURCES[0]), *libraries, "-o", str(new)], check=True)
            new.replace(library)
    return library


@functools.cache
def install() -> None:
    """Install the fake CUDA in this process, before CUDA is used.  torch may already be imported."""
    library = ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)
    report = Report(note)
    callbacks.append(report)
    pointer = ctypes.c_void_p.in_dll(library, "fake_cuda_report")
    pointer.value = ctypes.cast(report, ctypes.c_void_p).value
    atexit.register(setattr, pointer, "value", None)  # threads of torch outlive the interpreter
    set_devices(NUM_DEVICES)
    set_lag(LAG)
    for name, replacement in patches().items():
        setattr(torch.cuda, name, replacement)
    setattr(torch._C, "_host_emptyCache", int)  # noqa: B010  # torch's stubs lack both
    setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in contexts())  # noqa: B010


def set_devices(number: int) -> None:
    """Set the number of visible devices."""
    torch.ops.rehearsal.set_devices(number)


def set_lag(launches: int) -> None:
    """Set how far the device stays behind the host."""
    torch.ops.rehearsal.set_lag(launches)


class Graph:
    """Replaces torch.cuda.CUDAGraph."""

    numbers = itertools.count()

    def __init__(self, keep_graph: bool = False) -> None:
        self.number = next(self.numbers)
        weakref.finalize(self, torch.ops.rehearsal.graph_free, self.number)

    def capture_begin(self, *pool: Any, **options: Any) -> None:
        torch.ops.rehearsal.graph_begin(self.number)

    def capture_end(self) -> None:
        torch.ops.rehearsal.graph_end()

    def replay(self) -> None:
        torch.ops.rehearsal.graph_replay(self.number)


def patches() -> dict[str, Any]:
    """Return replacements for functions of torch.cuda that need a CUDA build.  torch.accelerator needs none."""
    accelerator = torch.accelerator

    def index_of(device: Any) -> int:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return accelerator.current_device_index() if device.index is None else device.index

    def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda device=None: function(index_of(device))

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)  # the fake device uses the CPU's generator

    def register(address: int, size: int, flags: int) -> int:
        torch.ops.rehearsal.pin(address, size)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=torch.ops.rehearsal.unpin)
    return {
        "cudart": lambda: runtime,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": torch._C._accelerator_hooks_device_count,
        "set_device": on_device(torch._C._accelerator_setDeviceIndex),
        "current_device": accelerator.current_device_index,
        "_exchange_device": torch._C._accelerator_exchangeDevice,
        "_maybe_exchange_device": torch._C._accelerator_maybeExchangeDevice,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "CUDAGraph": Graph,
        "is_current_stream_capturing": lambda: False,  # a CUDA build of torch 2.11 would call the driver
        "set_sync_debug_mode": lambda mode: setattr(debug, "mode", mode),
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "set_stream": accelerator.set_stream,
        "current_stream": on_device(accelerator.current_stream),
        "synchronize": on_device(accelerator.synchronize),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_device_name": lambda device=None: "fake",
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="fake", total_memory=1 << 40, uuid=f"fake-{index_of(device)}"
        ),
        "mem_get_info": lambda device=None: ((1 << 40) - accelerator.memory_reserved(index_of(device)), 1 << 40),
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "memory_stats": on_device(accelerator.memory_stats),
        "memory_allocated": on_device(accelerator.memory_allocated),
        "max_memory_allocated": on_device(accelerator.max_memory_allocated),
        "reset_peak_memory_stats": on_device(accelerator.reset_peak_memory_stats),
        "empty_cache": accelerator.empty_cache,
    }


def note(kind: bytes, name: bytes, device: int, stream: int, copy: int) -> None:
    where = place(sys._getframe().f_back)
    if kind == b"copy":
        copied_where[copy] = where
    elif copy:  # a hazard, detected when the copy completes
        where = copied_where[copy]
    if debug.mode == "warn" and kind == b"sync" and not name.startswith(b"event"):  # as torch.cuda does
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    reports.append(Seen(kind.decode(), name.decode(), device, stream, where, threading.current_thread().name))


def place(frame: FrameType | None) -> str:
    """Return the innermost frame of megabatch, or the innermost frame if there is none."""
    innermost = frame
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}" if innermost else "a thread of torch"


def reset() -> None:
    reports.clear()
    torch.ops.rehearsal.reset()


def seen(*kinds: str) -> list[Seen]:
    return [report for report in list(reports) if report.kind in kinds]


def launches() -> Counter[str]:
    """Return the number of launches by operation."""
    counted: Counter[str] = Counter()
    for key, count in torch.ops.rehearsal.counts().items():
        kind, name, _, _ = key.split("\t")
        if kind == "launch":
            counted[name] += count
    return counted


def contexts() -> list[int]:
    """Return the devices on which this process has a context since `reset`."""
    return sorted(torch.ops.rehearsal.contexts())


@contextlib.contextmanager
def traced() -> Iterator[list[Seen]]:
    """Yield a list that is filled at the end with all reports, including launches and allocations."""
    first, during = len(reports), list[Seen]()
    torch.ops.rehearsal.set_tracing(True)
    try:
        yield during
    finally:
        torch.ops.rehearsal.set_tracing(False)
        during += reports[first:]


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares the memory."""
    with torch.no_grad():
        return torch.ops.rehearsal.host_view(tensor) if tensor.is_cuda else tensor.detach()
