"""The studies that come with megabatch, and those of a user: TOML files."""

from importlib import resources
from pathlib import Path

import msgspec

from megabatch.errors import UserError, nearest
from megabatch.studies.design import Design
from megabatch.studies.evidence import slug
from megabatch.text import one_line
from megabatch.toml import NotToml, parse_toml, read_toml

LONGEST_PATH = 300  # letters of one that are shown
DESIGNS = resources.files("megabatch.studies") / "designs"


def study_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in DESIGNS.iterdir() if entry.name.endswith(".toml"))


def read_design(study: str) -> Design:
    """Of a name, or of a user's file; UserError."""
    shown = one_line(study, LONGEST_PATH)
    try:
        is_ours = study in study_names()
        tables = parse_toml((DESIGNS / f"{study}.toml").read_text("utf-8")) if is_ours else read_toml(study)
    except NotToml as error:
        raise UserError(f"{shown} is not TOML: {error}") from None
    except OSError as error:
        raise UserError(
            f"study {shown!r} is neither one of {', '.join(study_names())} nor a readable TOML file "
            f"({error.strerror}); nearest: {nearest(study, study_names())}"
        ) from None
    try:
        return msgspec.convert({"name": slug(Path(study).stem) or "study"} | tables, Design)
    except msgspec.ValidationError as error:
        reason = error.__cause__ if isinstance(error.__cause__, UserError) else f"{error}; see docs/studies.md"
        raise UserError(one_line(f"{shown}: {reason}", 2 * LONGEST_PATH)) from None
