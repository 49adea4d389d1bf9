"""Utilisation, power, clocks and errors of a rank's GPU, sampled by a thread through NVML.

NVML is called through ctypes: its library comes with every NVIDIA driver, and a Python package for it would be a
dependency for nine functions.  Once per second, a sample takes microseconds to milliseconds in the driver; meanwhile
the thread does not hold the GIL.  Without NVML, as on AMD's GPUs, there are no records.

A GPU that is throttled is usually the straggler, because it computes the same steps at a lower clock.
"""

import ctypes
import threading
from collections import Counter
from contextlib import suppress
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p
from typing import Any, Self

from megabatch.runs.records import GpuUse, Slowdown

LIBRARY = "libnvidia-ml.so.1"
INTERVAL_S = 1.0
SM_CLOCK, TEMPERATURE_OF_GPU, UNCORRECTED, SINCE_DRIVER_START = 1, 0, 1, 0  # of nvml.h
XID_EVENT = 0x8
# Bits of nvmlClocksEventReasons.  Others are normal: an idle GPU, or clocks that an administrator has set.
REASONS: dict[int, Slowdown] = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "power brake",
}


class Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class EventData(ctypes.Structure):
    _fields_ = (
        ("device", c_void_p),
        ("kind", c_ulonglong),
        ("data", c_ulonglong),  # the Xid
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class NvmlError(OSError):
    pass


class Nvml:
    """The GPU with this UUID.  Raises OSError if there is no NVML, or if it does not know the GPU."""

    def __init__(self, uuid: str) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        self.call("nvmlInit_v2")
        self.handle, self.events = c_void_p(), c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid.removeprefix('GPU-')}".encode(), byref(self.handle))
        with suppress(NvmlError):  # not supported in some virtual machines
            self.call("nvmlEventSetCreate", byref(self.events))
            self.call("nvmlDeviceRegisterEvents", self.handle, c_ulonglong(XID_EVENT), self.events)

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self.library, name)
        except AttributeError as error:
            raise NvmlError(f"{name} is not in {LIBRARY}") from error
        code = function(*arguments)
        if code:
            raise NvmlError(f"{name} returned {code}")

    def read(self, name: str, *arguments: Any, kind: Any = c_uint) -> Any:
        """Return the value of a function of the GPU, or None if the GPU does not support it."""
        value = kind()
        with suppress(NvmlError):
            self.call(name, self.handle, *arguments, byref(value))
            return value if kind is Utilization else value.value
        return None

    def num_xids(self) -> int:
        """Return the number of critical errors since the last call."""
        count, data = 0, EventData()
        with suppress(NvmlError):
            while self.events:
                self.call("nvmlEventSetWait_v2", self.events, byref(data), c_uint(0))  # fails if there is none
                count += 1
        return count


class Totals:
    """Sums of samples."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.sums: dict[str, float] = {}
        self.counts: Counter[str] = Counter()  # of the samples with a value
        self.reasons: Counter[Slowdown] = Counter()
        self.temperature_c: int | None = None

    def add(self, name: str, value: float | None) -> None:
        if value is not None:
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] += 1

    def mean(self, name: str) -> float | None:
        return round(self.sums[name] / self.counts[name], 3) if self.counts[name] else None


class GpuSampler:
    """A thread that takes samples of a GPU while the context lasts."""

    def __init__(self, uuid: str | None) -> None:
        self.nvml: Nvml | None = None
        with suppress(OSError):
            self.nvml = Nvml(uuid) if uuid else None
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.totals, self.num_xids = Totals(), 0
        self.ecc_before = self.ecc_errors()
        self.thread = threading.Thread(target=self.work, name="gpu-telemetry", daemon=True)

    def __enter__(self) -> Self:
        if self.nvml:
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()  # not joined: a call of a failing driver may not return

    def work(self) -> None:
        while not self.ended.wait(INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        nvml = self.nvml
        assert nvml
        use = nvml.read("nvmlDeviceGetUtilizationRates", kind=Utilization)
        power_mw = nvml.read("nvmlDeviceGetPowerUsage")
        clock_mhz = nvml.read("nvmlDeviceGetClockInfo", c_int(SM_CLOCK))
        # Later drivers call them event reasons, and keep this name.
        reasons = nvml.read("nvmlDeviceGetCurrentClocksThrottleReasons", kind=c_ulonglong) or 0
        temperature_c = nvml.read("nvmlDeviceGetTemperature", c_int(TEMPERATURE_OF_GPU))
        num_xids = nvml.num_xids()
        with self.lock:
            totals = self.totals
            totals.num_samples += 1
            totals.add("utilization", use and use.gpu / 100)
            totals.add("power_w", power_mw and power_mw / 1000)
            totals.add("clock_mhz", clock_mhz)
            totals.reasons.update({reason for bit, reason in REASONS.items() if reasons & bit})
            if temperature_c is not None:
                totals.temperature_c = max(temperature_c, totals.temperature_c or 0)
            self.num_xids += num_xids

    def ecc_errors(self) -> int | None:
        kinds = c_int(UNCORRECTED), c_int(SINCE_DRIVER_START)
        return self.nvml.read("nvmlDeviceGetTotalEccErrors", *kinds, kind=c_ulonglong) if self.nvml else None

    def take(self) -> GpuUse | None:
        """Return the use of the GPU since the last call; None without a sample."""
        if self.nvml is None:
            return None
        ecc_errors = self.ecc_errors()
        with self.lock:
            totals, self.totals = self.totals, Totals()
        if not totals.num_samples:
            return None
        return GpuUse(
            utilization=totals.mean("utilization"),
            power_w=totals.mean("power_w"),
            clock_mhz=totals.mean("clock_mhz"),
            temperature_c=totals.temperature_c,
            slowed={reason: round(count / totals.num_samples, 4) for reason, count in sorted(totals.reasons.items())},
            ecc_errors=None if ecc_errors is None else max(0, ecc_errors - (self.ecc_before or 0)),
            xid_errors=self.num_xids,
        )
