"""Parsing of the options of `megabatch simulate`: ranks, a time, a sweep, overrides."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct, field, inspect

from megabatch.errors import UserError, nearest, plain_rule
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.load import keys_of_cluster, parse_cluster_override

MOST_RANKS = 1_000_000
MOST_VALUES = 64  # of --ranks or a sweep, for a readable table
SECONDS = {"s": 1, "min": 60, "h": 3600}
LONGEST_S = 10 * 365.25 * 86_400
MOST_USD = 1e9
MISSPELT = 0.75  # similarity from which a name counts as a misspelt section of a cluster

SECTIONS = {key.partition(".")[0] for key in keys_of_cluster()}


class Sweep(NamedTuple):
    key: str  # of a cluster
    values: list[int | float]


def parse_ranks(text: str) -> list[int]:
    """Return the distinct numbers of `8,64,512`; `8..2048` is 8, 16, 32, up to 2048."""
    ranks = list(dict.fromkeys(count for part in text.split(",") for count in parse_range(part.strip(), text)))
    if len(ranks) > MOST_VALUES:
        raise UserError(f"--ranks has {len(ranks):,} values; the limit is {MOST_VALUES}; give fewer")
    return ranks


def parse_range(part: str, text: str) -> list[int]:
    first, dots, last = part.partition("..")
    low, high = parse_count(first, text), parse_count(last if dots else first, text)
    if low > high:
        raise UserError(f"--ranks {text}: {low} is more than {high}; nearest: --ranks {high}..{low}")
    return [low << doublings for doublings in range((high // low).bit_length())]


def parse_count(part: str, text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,12}\s*", part):
        raise UserError(f"--ranks {text}: {part!r} is not an integer; for example --ranks 8,64,512 or --ranks 8..2048")
    count = int(part)
    if not 1 <= count <= MOST_RANKS:
        closest = 1 if count < 1 else MOST_RANKS
        raise UserError(f"--ranks {text}: {count} is not from 1 to {MOST_RANKS:,}; nearest: --ranks {closest}")
    return count


def parse_within(text: str) -> float:
    """Return the seconds of a text such as `10min`, `600s` or `1.5h`."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|min|h)\s*", text)
    if not found:
        raise UserError(f"--within {text} is not a time; give a number and s, min or h, for example --within 10min")
    seconds = float(found[1]) * SECONDS[found[2]]
    if not 0 < seconds <= LONGEST_S:
        raise UserError(f"--within {text} must be above 0 and at most ten years; for example --within 10min")
    return seconds


def parse_budget(text: str) -> float:
    """Return the dollars of a text such as `100usd` or `2.5usd`."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*usd\s*", text, re.IGNORECASE)
    if not found or not 0 < float(found[1]) <= MOST_USD:
        raise UserError(f"--budget {text} is not an amount above 0 in usd; for example --budget 100usd")
    return float(found[1])


def parse_sweep(text: str) -> Sweep:
    """Return the key and values of a text such as `network.gbps=10,25,100`."""
    key, equals, listed = text.partition("=")
    known = [name for name, kind in keys_of_cluster().items() if isinstance(kind, inspect.IntType | inspect.FloatType)]
    if not equals or not listed.strip():
        raise UserError(f"--sweep {text} has no values; for example --sweep network.gbps=10,25,100,400")
    if key not in known:
        raise UserError(
            f"--sweep {text}: {key} is not a number of a cluster; nearest: --sweep {nearest(key, known)}=..."
        )
    values: list[int | float] = []
    for part in map(str.strip, listed.split(",")):
        value = parse_cluster_override(f"{key}={part}").value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"--sweep {key}: {part!r} is not a number; for example --sweep {key}=10,25,100")
        values.append(value)
    if len(values) > MOST_VALUES:
        raise UserError(f"--sweep {key} has {len(values)} values; the limit is {MOST_VALUES}; give fewer")
    return Sweep(key, values)


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the cluster, and those of the recipe or model."""
    of_cluster = [override for override in overrides if is_of_cluster(override.partition("=")[0])]
    return of_cluster, [override for override in overrides if override not in of_cluster]


def is_of_cluster(key: str) -> bool:
    """Return True for keys of a cluster, even with a misspelt or missing section: load_cluster reports the nearest."""
    section, dot, _ = key.partition(".")
    if not dot:
        top = {member.encode_name for member in msgspec.structs.fields(Cluster)}
        return key in top | {known.rpartition(".")[2] for known in keys_of_cluster()}
    return bool(get_close_matches(section, SECTIONS, n=1, cutoff=MISSPELT))


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a model without a recipe."""

    precision: str | None = field(default=None, name="precision.name")
    image_size: Annotated[int, Meta(ge=8, le=8192)] | None = field(default=None, name="data.image_size")
    microbatch: Annotated[int, Meta(ge=1, le=10**6)] | None = field(default=None, name="batch.micro")
    epochs: Annotated[float, Meta(gt=0, le=10**6)] | None = field(default=None, name="train.epochs")


EXAMPLES = {"precision.name": "fp32", "data.image_size": "224", "batch.micro": "64", "train.epochs": "90"}


def parse_model_settings(overrides: Sequence[str]) -> ModelSettings:
    values: dict[str, object] = {}
    for override in overrides:
        _, key, value = parse_cluster_override(override, is_string=lambda key: key == "precision.name")
        if key not in EXAMPLES:
            raise UserError(
                f"{override}: without a recipe, a model has only the settings {', '.join(EXAMPLES)}; "
                f"nearest: {nearest(key, EXAMPLES)}, or give a recipe instead of the model"
            )
        values[key] = value
        try:
            msgspec.convert({key: value}, ModelSettings)
        except msgspec.ValidationError as error:
            rule = plain_rule(str(error).partition(" - at")[0])
            raise UserError(f"{override}: {rule}; for example {key}={EXAMPLES[key]}") from None
    return msgspec.convert(values, ModelSettings)
