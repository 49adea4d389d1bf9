"""The reference of all settings, as the schema has them: for `megabatch settings`, and as docs/settings.md."""

import re
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from megabatch.config.descriptions import DEFAULTS, MEANINGS
from megabatch.config.schema import FIELDS, PREEMPT_SIGNALS
from megabatch.models.catalog import MODELS
from megabatch.optim.lars import VARIANTS
from megabatch.optim.optimizers import OPTIMIZERS
from megabatch.optim.schedules import DECAYS
from megabatch.planning.algorithms import ALGORITHMS, ON_REQUEST
from megabatch.precision.policy import PRECISIONS
from megabatch.ranks.backends import BACKENDS

# Texts of which the Structs take these alone (`require_one_of`); model.name takes a factory's besides.
CHOICES = {
    "model.name": [*MODELS, "package.module:factory"],
    "optim.name": [*OPTIMIZERS, "package.module:function"],
    "optim.variant": VARIANTS,
    "schedule.decay": DECAYS,
    "comm.algorithm": ["auto", *ALGORITHMS, *ON_REQUEST],
    "precision.name": PRECISIONS,
    "run.device": ["auto", *BACKENDS],
    "run.preempt_signal": PREEMPT_SIGNALS,
}
POWERS: dict[float, str] = {
    2**30: "2^30",
    2**32: "2^32",
    2**63 - 1: "2^63 - 1",
    **{10**n: f"1e{n}" for n in range(6, 13)},
}
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
HEADER = """\
# Settings

Written by `megabatch settings --markdown > docs/settings.md`; a test asks that it is current. `megabatch settings
optim` prints a part of it on the terminal, and `megabatch show RECIPE --toml` the values of a recipe.
[Recipes](recipes.md) says how they are given: in a TOML file, and on the command line as `section.key=value`.

`[` and `]` are bounds that belong to a range, `(` and `)` bounds that do not.
"""


class Setting(Struct, frozen=True):
    """A row of the reference; the texts are Markdown."""

    name: str
    takes: str
    default: str
    meaning: str

    @property
    def section(self) -> str:
        return self.name.partition(".")[0] if "." in self.name else ""


def all_settings() -> list[Setting]:
    return [Setting(key, takes(key), default_of(key), MEANINGS[key]) for key in FIELDS]


def takes(key: str) -> str:
    """Type and range, such as: number in (0, 1e6]."""
    if key in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[key])
    kind = FIELDS[key].type
    members = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return " or ".join(words for member in members for words in kinds(member))


def kinds(kind: msgspec.inspect.Type) -> Iterator[str]:
    match kind:
        case msgspec.inspect.IntType():
            yield f"integer in {bounds(kind)}"
        case msgspec.inspect.FloatType():
            yield f"number in {bounds(kind)}"
        case msgspec.inspect.BoolType():
            yield "`true`, `false`"
        case msgspec.inspect.LiteralType():
            yield ", ".join(f"`{value}`" for value in kind.values)
        case msgspec.inspect.StrType():
            yield "text"
        case msgspec.inspect.ListType():
            yield "list of texts"
        case msgspec.inspect.DictType():
            yield "table"


def bounds(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    """Both ends are there: a test of the schema asks for them."""
    low = f"[{shown(kind.ge)}" if kind.ge is not None else f"({shown(kind.gt)}"
    return f"{low}, " + (f"{shown(kind.le)}]" if kind.le is not None else f"{shown(kind.lt)})")


def shown(value: float | None) -> str:
    assert value is not None
    return POWERS.get(value, f"{value:g}")


def default_of(key: str) -> str:
    if key in DEFAULTS:
        return DEFAULTS[key]
    field = FIELDS[key]
    if field.required:
        return "must be set"
    if field.default is msgspec.NODEFAULT or field.default in (None, ""):  # an empty list or table
        return "none"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default:.4g}`" if isinstance(field.default, float) else f"`{field.default}`"


def page() -> str:
    """docs/settings.md."""
    sections: dict[str, list[Setting]] = {}
    for setting in all_settings():
        sections.setdefault(setting.section, []).append(setting)
    lines = [HEADER]
    for section, settings in sections.items():
        title = f"`{section}`" if section else "The recipe itself"
        lines += [f"## {title}", "| setting | takes | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{each.name}` | {each.takes} | {each.default} | {each.meaning} |" for each in settings]
        lines.append("")
    return "\n".join(lines)


def plain(markdown: str) -> str:
    """As it is read on a terminal."""
    return LINK.sub(r"\1", markdown).replace("`", "")
