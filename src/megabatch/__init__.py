"""Training of image classifiers with huge batches, on one machine or a cluster.

import megabatch
summary = megabatch.fit(network, train=(images, labels), test=(images, labels), overrides=["batch.global=256"])
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Imported when first used, so that `megabatch --help` does not import torch.
PUBLIC = {
    "fit": "megabatch.training.fit",
    "load": "megabatch.inference.classifier",
    "load_config": "megabatch.config.loading",
    "UserError": "megabatch.errors",
}


def __getattr__(name: str) -> Any:
    if name == "comm":
        return importlib.import_module("megabatch.comm")
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'megabatch' has no attribute {name!r}")
