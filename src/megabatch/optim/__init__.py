"""Optimizers that do not need the trainer: `LARS(parameter_groups(model, weight_decay=5e-5), lr=10.0)`."""

from megabatch.optim.groups import parameter_groups
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import LARS
from megabatch.optim.muon import Muon

__all__ = ["LAMB", "LARS", "Muon", "parameter_groups"]
