"""RunConfig: everything that a recipe can say, checked once, before anything is started or written.

A recipe is a TOML file; `section.key=value` words override it.  Each section is a frozen Struct that stands beside
the code that reads it.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from megabatch.comm.settings import CommSettings
from megabatch.data.settings import DataSettings
from megabatch.errors import UserError, nearest
from megabatch.models.catalog import ModelSettings
from megabatch.models.loss import LossSettings
from megabatch.optim.optimizers import OptimSettings
from megabatch.optim.schedules import ScheduleSettings
from megabatch.planning.batch import BatchSettings
from megabatch.precision.policy import PrecisionSettings

RECIPES = resources.files("megabatch.recipes")
MARKS = ("interpolated", "extrapolated", "assumed")  # begins a mark; a colon and the reason follow
Settings = dict[str, Any]


class TrainSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    epochs: Annotated[float, Meta(gt=0)]
    target_top1: Annotated[float, Meta(gt=0, le=1)] | None = None  # the accuracy whose time is reported
    evaluate_every: Annotated[int, Meta(ge=0)] = 1  # epochs, and after the last; 0: after the last alone


class CheckpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With neither `every_steps` nor `every_minutes`, as often as costs a hundredth of the time."""

    every_steps: Annotated[int, Meta(ge=0)] = 0
    every_minutes: Annotated[float, Meta(ge=0)] = 0.0
    keep: Annotated[int, Meta(ge=1)] = 2  # the newest; the best is kept besides


class RunSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dir: str | None = None  # the run's folder; by default runs/<recipe>-<nnn>
    device: str = "auto"  # cuda where there is one, else cpu
    threads: Annotated[int, Meta(ge=1)] | None = None  # of a rank; by default its share of the cores
    decode_threads: Annotated[int, Meta(ge=1)] | None = None  # beside them, for images; by default as many
    deterministic: bool = False  # on CUDA: convolutions are chosen by rule, and not by timing them


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    name: Annotated[str, Meta(pattern=r"^[\w.-]*$")] = ""  # of the recipe; by default that of its file
    about: str = ""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1
    model: ModelSettings
    data: DataSettings
    batch: BatchSettings
    optim: OptimSettings
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    comm: CommSettings = field(default_factory=CommSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    train: TrainSettings
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RunSettings = field(default_factory=RunSettings)
    marks: dict[str, str] = field(default_factory=dict)  # settings whose values no source gives, and why

    def __post_init__(self) -> None:
        if self.schedule.warmup_epochs >= self.train.epochs:
            raise UserError(
                f"train.epochs={self.train.epochs:g} is no longer than schedule.warmup_epochs="
                f"{self.schedule.warmup_epochs:g}; for example also schedule.warmup_epochs={self.train.epochs / 4:g}"
            )

    def with_run(self, **changes: Any) -> "RunConfig":
        return msgspec.structs.replace(self, run=msgspec.structs.replace(self.run, **changes))

    def to_toml(self) -> str:
        """The resolved recipe; what is None is left out, as TOML has no word for it."""
        return msgspec.toml.encode(without_none(msgspec.to_builtins(self))).decode()


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(member) for key, member in value.items() if member is not None}
    return value


def recipe_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in RECIPES.iterdir() if entry.name.endswith(".toml"))


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe (a name or a TOML file) with `section.key=value` overrides, or UserError."""
    settings = {"name": re.sub(r"[^\w.-]+", "-", Path(recipe).stem)} | read_recipe(recipe)
    for word in overrides:
        override(settings, word)
    check_keys(settings)
    check_complete(settings)
    settle_marks(settings, [word.partition("=")[0] for word in overrides])
    try:
        return msgspec.convert(settings, RunConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(explain(str(error), settings)) from None


def read_recipe(recipe: str) -> Settings:
    if recipe in recipe_names():
        return tomllib.loads((RECIPES / f"{recipe}.toml").read_text())
    path = Path(recipe)
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"recipe {recipe!r} is neither one of `megabatch recipes` nor a readable TOML file "
            f"({getattr(error, 'strerror', None) or error}); nearest: {nearest(recipe, recipe_names())}"
        ) from None


def override(settings: Settings, word: str) -> None:
    """Applies one `section.key=value`.  The value is TOML; what is not TOML is a string."""
    key, equals, text = word.partition("=")
    if not equals:
        raise UserError(f"{word!r} is not an override; expected section.key=value, such as batch.global=512")
    *sections, name = key.split(".")
    place = settings
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise UserError(f"{word!r}: {section} is not a section; {suggest(key)}")
    place[name] = parse_value(text, wants_text=isinstance(kind_of(key), msgspec.inspect.StrType))


def parse_value(text: str, wants_text: bool) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if wants_text and not isinstance(value, str) else value  # run.dir=2026 is a folder


def fields_of(struct: type[Struct], prefix: str = "") -> Iterator[tuple[str, msgspec.inspect.Field]]:
    """Every setting by its dotted name."""
    described = msgspec.inspect.type_info(struct)
    assert isinstance(described, msgspec.inspect.StructType)
    for member in described.fields:
        name = prefix + member.encode_name
        if isinstance(member.type, msgspec.inspect.StructType):
            yield from fields_of(member.type.cls, f"{name}.")
        else:
            yield name, member


FIELDS = dict(fields_of(RunConfig))


def kind_of(key: str) -> msgspec.inspect.Type | None:
    """The type of a setting, which None aside is always one; None if there is no such setting."""
    kind = FIELDS[key].type if key in FIELDS else None
    if isinstance(kind, msgspec.inspect.UnionType):
        return next(member for member in kind.types if not isinstance(member, msgspec.inspect.NoneType))
    return kind


def check_keys(settings: Settings, prefix: str = "") -> None:
    for name, value in settings.items():
        key = prefix + name
        if key in FIELDS:
            continue
        members = [known for known in FIELDS if known.startswith(f"{key}.")]
        if isinstance(value, dict) and value:  # an unknown section is reported by its first member
            check_keys(value, f"{key}.")
        elif not members:
            raise UserError(f"{key}={show_value(value)}: there is no setting {key}; {suggest(key)}")
        elif not isinstance(value, dict):
            raise UserError(f"{key}={show_value(value)}: {key} is a section of {', '.join(members)}; give one of them")


def check_complete(settings: Settings) -> None:
    """What has no default must be there; and no number may be infinite or NaN."""
    given = dict(flatten(settings))
    missing = [key for key, member in FIELDS.items() if member.required and key not in given]
    if missing:
        raise UserError(f"{', '.join(missing)} must be set; {' '.join([example(key) for key in missing][:1])}")
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value}: expected a finite number; {example(key)}")


def settle_marks(settings: Settings, overridden: Sequence[str]) -> None:
    """Brings marks to dotted names, checks them, and drops those whose value is now the user's."""
    if not isinstance(settings.get("marks"), dict):
        return
    marks = dict(flatten(settings["marks"]))
    for key, text in marks.items():
        if key not in FIELDS:
            raise UserError(f"marks.{key}={show_value(text)}: there is no setting {key}; {suggest(key)}")
        if not isinstance(text, str) or not re.fullmatch(rf"({'|'.join(MARKS)}): \S.*", text):
            raise UserError(
                f"marks.{key}={show_value(text)}: a mark is one line that begins with {': or '.join(MARKS)}:, and says "
                f'why; for example marks.{key}="assumed: no source gives it"'
            )
    users = {
        key for key in marks for word in overridden if f"{word}.".startswith(f"{key}.") or key.startswith(f"{word}.")
    }
    settings["marks"] = {key: text for key, text in marks.items() if key not in users}


def marked_settings(config: RunConfig) -> dict[str, list[str]]:
    """The marked settings by the kind of their mark."""
    kinds = {kind: [key for key, text in config.marks.items() if text.startswith(f"{kind}:")] for kind in MARKS}
    return {kind: keys for kind, keys in kinds.items() if keys}


def flatten(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict) and prefix + name not in FIELDS:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def suggest(key: str) -> str:
    """The known setting that looks most like `key`: by its last word first, since a section is easily forgotten."""
    word = key.rpartition(".")[2]
    by_word = {known.rpartition(".")[2]: known for known in FIELDS}
    by_initials = {"".join(part[0] for part in known.split("_")): known for known in by_word if "_" in known}  # lr
    close = [by_initials[word]] if word in by_initials else difflib.get_close_matches(word, by_word, n=1, cutoff=0.8)
    return f"nearest: {by_word[close[0]] if close else nearest(key, FIELDS)}"


def explain(error: str, settings: Settings) -> str:
    """Turns msgspec's "Expected `float` > 0.0 - at `$.optim.learning_rate`" into value, rule and remedy."""
    rule, _, path = error.partition(" - at `$")
    path = path.strip("`.").partition("[")[0]  # of a list's member, the list
    rule = rule.replace("`", "").replace(" | null", "")  # TOML has no null
    if rule.startswith("Invalid enum value"):
        rule = f"Expected {' or '.join(choices(path))}"
    value: Any = settings
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else value
    return f"{path}={show_value(value)}: {rule[0].lower()}{rule[1:]}; {remedy(path, value)}"


def choices(key: str) -> Iterator[str]:
    """What a setting that takes certain words may be."""
    kind = FIELDS[key].type
    for member in kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,):
        if isinstance(member, msgspec.inspect.LiteralType):
            yield from map(str, member.values)
        else:
            yield "a number"


def remedy(key: str, value: Any) -> str:
    """The bound that `value` has overstepped, the whole number next to it, or a value that is known to be good."""
    kind = kind_of(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        lowest, highest = getattr(kind, "ge", None), getattr(kind, "le", None)
        if lowest is not None and value < lowest:
            return f"nearest: {key}={lowest}"
        if highest is not None and value > highest:
            return f"nearest: {key}={highest}"
        if isinstance(kind, msgspec.inspect.IntType) and isinstance(value, float):
            return f"nearest: {key}={round(value)}"
    return example(key)


def example(key: str) -> str:
    """The setting as the default recipe has it, or its default."""
    value: Any = read_recipe("fashion")
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None and key in FIELDS and FIELDS[key].default not in (msgspec.NODEFAULT, None):
        value = FIELDS[key].default
    return f"for example {key}={show_value(value)}" if value is not None else f"leave {key} out for its default"


def show_value(value: Any) -> str:
    """As it would stand in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float | str | dict | list) else str(value)
