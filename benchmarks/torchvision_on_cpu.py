"""torchvision without its compiled operators; timm, which imports it, works after this too.

The wheels of torchvision are built for CUDA: beside a CPU build of torch (`pip install --no-deps torchvision`) its
operators do not load, and its import fails where it describes two of them.
"""

import importlib
from types import ModuleType

import torch

STUBS = torch.library.Library("torchvision", "FRAGMENT")  # what it defines lives as long as it does


def import_torchvision() -> ModuleType | None:
    """The module, or None where it is not installed.  Stubs are defined only if they are missed."""
    try:
        return importlib.import_module("torchvision")
    except ImportError:
        return None
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for operator in ("nms", "qnms"):
        STUBS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")
