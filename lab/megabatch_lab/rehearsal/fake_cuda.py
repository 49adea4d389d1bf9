"""A CUDA without a GPU, to rehearse the GPU path on a CPU or CUDA build of torch.  fake_cuda.cpp says how it works.

    fake_cuda.install()                        # once in a process, before anything of CUDA is used
    fake_cuda.reset()
    ...                                        # whatever uses "cuda" tensors, streams and events
    fake_cuda.launches()                       # Counter by operation
    fake_cuda.seen("sync")                     # what waited for the device, and the line of megabatch that caused it

A real device has asynchrony, cuDNN, NCCL, memory limits and a speed: nothing here shows those.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch

import megabatch

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("fake_cuda.cpp", "memory.h", "device.h", "ordering.h")]
BUILT = Path.home() / ".cache" / "megabatch" / "rehearsal"  # shared by all checkouts; XDG_CACHE_HOME is a test's own
TORCH = Path(torch.__file__).parent
OPTIONS = ["-O1", "-fPIC", "-shared", "-std=c++20", "-w"]
PACKAGE = f"{Path(megabatch.__file__).parent}/"
LAG = 20  # launches after which an event that was recorded is complete
NUM_DEVICES = int(os.environ.get("FAKE_CUDA_DEVICES", "8"))
HAS_GPU = torch.cuda.is_available()  # asked here: `install` makes the answer yes

Report = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Seen(NamedTuple):
    """sync, hazard, copy or record_stream; where traced, also launch and allocation."""

    kind: str
    name: str  # of an allocation: its bytes
    device: int
    stream: int  # 0 is the default one
    where: str  # file:line of the innermost megabatch frame
    thread: str


reports: list[Seen] = []
copied_where: dict[int, str] = {}  # by the number of the copy
kept: list[Any] = []  # what C++ points to


def why_not() -> str | None:
    """Return the reason that there can be no fake CUDA here, or None."""
    if torch.version.hip:
        return "needs a CPU or CUDA build of torch: this one is for ROCm"
    if HAS_GPU:
        return "needs a machine without a GPU: hide it with CUDA_VISIBLE_DEVICES="
    return None if shutil.which("g++") else "needs g++: install it"


def build() -> Path:
    """The library, compiled if nobody has: whoever comes second waits for the first."""
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
    """Gives this process a CUDA.  torch may have been imported, but not asked for one."""
    library = ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)
    report = Report(note)
    kept.append(report)
    pointer = ctypes.c_void_p.in_dll(library, "fake_cuda_report")
    pointer.value = ctypes.cast(report, ctypes.c_void_p).value
    atexit.register(setattr, pointer, "value", None)  # threads of torch outlive the interpreter
    set_devices(NUM_DEVICES)
    set_lag(LAG)
    for name, replacement in patches().items():
        setattr(torch.cuda, name, replacement)


def set_devices(number: int) -> None:
    """How many there are to see."""
    torch.ops.rehearsal.set_devices(number)


def set_lag(launches: int) -> None:
    """How far the device stays behind the host."""
    torch.ops.rehearsal.set_lag(launches)


def patches() -> dict[str, Any]:
    """torch.accelerator, torch.Stream and torch.Event work by themselves; what torch.cuda asks a CUDA build for."""
    accelerator = torch.accelerator

    def index_of(device: Any) -> int:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return accelerator.current_device_index() if device.index is None else device.index

    def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda device=None: function(index_of(device))

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)  # the fake device draws the CPU's numbers

    return {
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
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "set_stream": accelerator.set_stream,
        "current_stream": on_device(accelerator.current_stream),
        "synchronize": on_device(accelerator.synchronize),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_device_name": lambda device=None: "fake",
        "get_device_properties": lambda device=None: SimpleNamespace(name="fake", total_memory=1 << 40),
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
    elif copy:  # a hazard, found by whoever completes the copy
        where = copied_where[copy]
    reports.append(Seen(kind.decode(), name.decode(), device, stream, where, threading.current_thread().name))


def place(frame: FrameType | None) -> str:
    """The innermost frame of megabatch, else of whoever it is."""
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
    """By operation."""
    counted: Counter[str] = Counter()
    for key, count in torch.ops.rehearsal.counts().items():
        kind, name, _, _ = key.split("\t")
        if kind == "launch":
            counted[name] += count
    return counted


@contextlib.contextmanager
def traced() -> Iterator[list[Seen]]:
    """What happens inside, with every launch and allocation."""
    first, during = len(reports), list[Seen]()
    torch.ops.rehearsal.set_tracing(True)
    try:
        yield during
    finally:
        torch.ops.rehearsal.set_tracing(False)
        during += reports[first:]


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the same bytes."""
    with torch.no_grad():
        return torch.ops.rehearsal.host_view(tensor) if tensor.is_cuda else tensor.detach()
