"""The [provenance] of a recipe: which of its values no source gives, and what they rest on instead.

optim.learning_rate = "interpolated: 12.8 at 13,056 and 21.2 at 32,768, log-log"
"""

import re
from collections.abc import Sequence

from megabatch.config.messages import show_key, show_value, suggest
from megabatch.config.schema import FIELDS, RunConfig, Settings, flatten
from megabatch.errors import UserError

KINDS = ("interpolated", "extrapolated", "assumed")  # what an entry begins with; a colon and the reason follow


def settle_provenance(settings: Settings, overridden: Sequence[str]) -> None:
    """Brings the entries to dotted names, checks them, and drops those whose value the user has overridden."""
    if not isinstance(settings.get("provenance"), dict):
        return  # whatever else it is, msgspec refuses it
    entries = dict(flatten(settings["provenance"]))
    for key, text in entries.items():
        check_entry(key, text)
    settings["provenance"] = {
        key: text for key, text in entries.items() if not any(overlap(key, other) for other in overridden)
    }


def check_entry(key: str, text: object) -> None:
    entry = f"provenance.{show_key(key)}={show_value(text)}"
    if key not in FIELDS:
        raise UserError(f"{entry}: there is no setting {show_key(key)}; {suggest(key)}")
    if not isinstance(text, str) or not re.fullmatch(rf"({'|'.join(KINDS)}): \S.*", text):
        raise UserError(
            f"{entry}: expected one line that begins with {': or '.join(KINDS)}:, and says why; "
            f'for example provenance.{key}="assumed: no source gives it"'
        )


def overlap(key: str, other: str) -> bool:
    """Whether the two are the same setting, or one is a section of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def settings_by_provenance(config: RunConfig) -> dict[str, list[str]]:
    """The settings that no source gives, by the kind of their provenance."""
    kinds = {kind: [key for key, text in config.provenance.items() if text.startswith(f"{kind}:")] for kind in KINDS}
    return {kind: keys for kind, keys in kinds.items() if keys}
