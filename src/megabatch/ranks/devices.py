"""The device of a rank: its choice, and why it cannot be used."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from megabatch.errors import UserError, require_one_of
from megabatch.ranks.backends import BACKENDS
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import bind_near_device, host_identity

# The oldest driver on which programs for each major version of CUDA run, by NVIDIA's table of minor version
# compatibility.
OLDEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580"}
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DEVICE_FILES = Path("/dev")


def choose_device(name: str) -> str:
    """Return the device type; `auto` is the accelerator if BACKENDS supports it, else the CPU."""
    require_one_of("run.device", name, ["auto", *BACKENDS])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator else "cpu"
    if found == "cpu" and name != "cpu":
        refuse_unusable_gpu()
    if name == "auto":
        return found if found in BACKENDS else "cpu"
    if name not in ("cpu", found):
        raise UserError(f"run.device={name!r}, but torch finds no {name.upper()} device here; nearest: run.device=cpu")
    return name


def refuse_unusable_gpu() -> None:
    """Raise UserError if this process may use an NVIDIA GPU and torch, which is built for CUDA, cannot."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] in ("", "-1", "NoDevFiles")
    node = None if torch.version.cuda is None or is_hidden else next(usable_nodes(), None)
    if node is None:
        return
    assert torch.version.cuda
    installed, needed = installed_driver(), OLDEST_DRIVER.get(int(torch.version.cuda.partition(".")[0]), "")
    if installed and needed and version(installed) < version(needed):
        raise UserError(
            f"the NVIDIA driver is {installed}, but torch {torch.__version__} is built for CUDA {torch.version.cuda}, "
            f"which needs {needed} or newer; update the driver, install torch for an older CUDA, or set run.device=cpu"
        )
    raise UserError(
        f"{node} exists, but torch cannot use it ({cuda_error()}); repair that, or set run.device=cpu to train on CPUs"
    )


def usable_nodes() -> Iterator[str]:
    """Yield the devices of GPUs that this process may open; cgroups may deny it those of other jobs."""
    for path in sorted(DEVICE_FILES.glob("nvidia[0-9]*")):
        with suppress(OSError):
            os.close(os.open(path, os.O_RDWR))
            yield str(path)


def installed_driver() -> str:
    """Return the version of the kernel's NVIDIA driver, or "" if it is not known."""
    with suppress(OSError):
        found = re.search(r"\s(\d+(?:\.\d+)+)\s", NVIDIA_DRIVER.read_text())
        return found[1] if found else ""
    return ""


def version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "it finds no device"


def choose_device_index(local_rank: int, num_local_ranks: int, num_visible: int) -> int:
    """Return the index of this rank's device among the visible ones.

    Most launchers let every rank see all devices of its node; srun --gpus-per-task=1 shows each rank only one.
    """
    if num_visible == 1:
        return 0
    if num_local_ranks > num_visible:
        raise UserError(
            f"{num_local_ranks} ranks on this node see {num_visible} devices, and each rank needs its own device; "
            f"nearest: {num_visible} ranks per node"
        )
    return local_rank % num_visible


def set_rank_device(info: RankInfo, device_type: str) -> torch.device:
    """Make this rank's device the current one and return it. A device that the script has set stays."""
    if device_type == "cpu":
        return torch.device("cpu")
    index = torch.accelerator.current_device_index() if dist.is_initialized() else 0
    index = index or choose_device_index(info.local_rank, info.num_local_ranks, torch.accelerator.device_count())
    torch.accelerator.set_device_index(index)
    if not dist.is_initialized():  # the process of a script is left as it is
        bind_near_device([cores_near(other) for other in range(torch.accelerator.device_count())], index)
    if torch.version.cuda:
        name = f"GPU {index} ({torch.cuda.get_device_name(index)})"
        require_kernels(name, torch.cuda.get_device_capability(index), torch.cuda.get_arch_list())
    return torch.device(device_type, index)


def cores_near(index: int) -> Path:
    """Return the file with the list of cores on the NUMA node of a device.  It exists only on Linux."""
    found = torch.cuda.get_device_properties(index)
    domain, bus, slot = (getattr(found, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    return Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/local_cpulist")


def require_kernels(name: str, capability: tuple[int, int], architectures: list[str]) -> None:
    """Raise UserError if torch has no kernels for a GPU: neither of its generation nor to be compiled for it."""
    built = []
    for architecture in architectures:  # such as sm_80, sm_90a and, for kernels that the driver compiles, compute_90
        kind, _, number = architecture.partition("_")
        built.append(divmod(int(number.rstrip("af")), 10))
        if built[-1] <= capability and (kind == "compute" or built[-1][0] == capability[0]):
            return
    if built:
        remedy = "install torch for CUDA 12.6" if capability < min(built) else "install a newer torch"
        raise UserError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, but torch {torch.__version__} is built "
            f"for {', '.join(architectures)}; {remedy}, or set run.device=cpu"
        )


def require_separate_devices(store: "dist.Store", info: RankInfo, device: torch.device) -> None:  # type: ignore[name-defined]
    """Raise UserError if another rank has the same device. NCCL would fail on all ranks, with a traceback."""
    if device.type == "cpu" or info.num_local_ranks == 1:
        return
    properties = torch.get_device_module(device).get_device_properties(device)
    place = f"{host_identity()} {getattr(properties, 'uuid', '')} {getattr(properties, 'pci_bus_id', '')}"
    other = store.compare_set(f"device-of/{place}", "", str(info.rank)).decode()
    if other != str(info.rank):
        raise UserError(
            f"ranks {other} and {info.rank} on {platform.node()} both use GPU {device.index} ({properties.name}); "
            "start one rank per GPU, and let each see all GPUs of its node or only its own"
        )
