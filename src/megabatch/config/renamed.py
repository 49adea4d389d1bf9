"""Settings that were renamed.  Their old names are still read: in recipes, in overrides and in a run's config.toml."""

from megabatch.config.schema import Settings
from megabatch.errors import UserError

PROVENANCE = "provenance"  # the section whose keys are the names of settings
RENAMED = {
    "comm.wire": "comm.dtype",
    "comm.fusion_mb": "comm.bucket_mb",
    "optim.trust": "optim.trust_coefficient",
    "optim.head_rate": "optim.head_learning_rate",
    "marks": PROVENANCE,
}


def current_name(key: str) -> str:
    """The dotted name that a setting or section has now."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            key = new + key.removeprefix(old)
    section, _, setting = key.partition(".")
    return f"{PROVENANCE}.{current_name(setting)}" if section == PROVENANCE and setting else key


def with_current_names(settings: Settings, section: str = "") -> tuple[Settings, dict[str, str]]:
    """The settings of a section under their current names, and the old names (old -> new) that were found."""
    prefix = f"{section}." if section else ""
    renamed: Settings = {}
    found: dict[str, str] = {}
    for name, value in settings.items():
        old, new = prefix + name, current_name(prefix + name)
        new_name = new.removeprefix(prefix)
        if new != old:
            if new_name in settings:
                raise given_twice(old, new, new)
            # A setting that has a provenance besides is the same setting: one line says both.
            found[old.removeprefix(f"{PROVENANCE}.")] = new.removeprefix(f"{PROVENANCE}.")
        if isinstance(value, dict):
            value, found_inside = with_current_names(value, new)
            found |= found_inside
        renamed[new_name] = value
    return renamed, found


def given_twice(one: str, other: str, new: str) -> UserError:
    return UserError(f"{one} and {other} are both given, and are the same setting; give {new} alone")


def describe_renamed(found: dict[str, str]) -> str:
    """One line, however many there are."""
    return ", ".join(f"{old} is now called {new}" for old, new in found.items())
