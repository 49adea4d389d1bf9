"""Import of user-defined Python code that a setting names as "package.module:attribute"."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megabatch.errors import UserError
from megabatch.torch_api import allow_torchvision_without_extension


def is_user_code(name: str) -> bool:
    return ":" in name


def import_user_code(setting: str, name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last, so that local files do not shadow packages
    allow_torchvision_without_extension()
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        package = module_name.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        remedy = f"install {package}, or put it" if is_missing else "expected package.module:factory, installed,"
        raise UserError(
            f"{setting}={name!r} cannot be imported ({error}); {remedy} on PYTHONPATH or in the current folder"
        ) from error
    if not callable(found):
        raise UserError(f"{setting}={name!r} is a {type(found).__name__}; it must be a function or a class")
    return found  # type: ignore[no-any-return]
