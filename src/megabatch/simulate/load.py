"""Reads cluster files: presets by name, one's own by path, with `section.key=value` overrides.

A TOML file may start from another (`base = "dgx-a100"`, or a file beside it), and then says only what differs.  A
device may be that of a file in devices/ (`device.like = "a100-mxnet"`), so that clusters share its points.  A JSON file
is what `megabatch plan` has measured; `this` is the last one of this machine.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from megabatch.errors import UserError, nearest
from megabatch.io.disk import cache_folder
from megabatch.io.reading import NotText, Undecodable, read_regular, read_text
from megabatch.io.toml import LONGEST_BYTES, NotToml, parse_toml
from megabatch.planning.cost import Link
from megabatch.planning.tuning import Tuning
from megabatch.planning.validate import MAX_BYTES, decode_tuning
from megabatch.simulate.cluster import Cluster
from megabatch.text import is_plain

# The cluster that `megabatch plan` has measured, as a cluster file would describe it.
#
# A link's beta says what one rank gets while all ranks of its node are at work: a node's card carries k times as
# much. Devices are not measured by a plan: what they compute comes from a profile (`--profile`).

LEAST_BETA = 1e-12  # s/B: bytes for which no time was found left
ASSUMED_GBPS, ASSUMED_ALPHA_US = 1.0, 100.0
PLAN = "measured by megabatch plan"
NO_NETWORK = "assumed: the plan was measured on one host; give it, as network.gbps=10"


def describe_measured(tuning: Tuning) -> dict[str, Any]:
    """As tables of a cluster file."""
    shape, links = tuning.topology.shape, tuning.links
    k = shape.largest_node
    inside = links.get("node") or links.get("all") or Link(0.0, LEAST_BETA, LEAST_BETA)
    between = (links.get("inter_node") or links.get("leaders") or links.get("all")) if shape.num_nodes > 1 else None
    ranks_at_work = k if "inter_node" in links else 1
    network: dict[str, Any] = {"nics": 1, "efficiency": 1.0, "kind": "tcp"}
    if between:
        bytes_per_s = ranks_at_work / max(LEAST_BETA, between.beta_s_per_byte)
        network |= {"gbps": 8e-9 * bytes_per_s, "alpha_us": 1e6 * between.alpha_s}
    else:
        network |= {"gbps": ASSUMED_GBPS, "alpha_us": ASSUMED_ALPHA_US}
    return {
        "about": f"{shape.num_nodes} hosts of {k} ranks, as measured",
        "device": {
            "name": "as recorded in the profile",
            "stack": "this installation",
            "memory_gb": 1e6,
            "memory_gb_per_s": 1e-9 / max(LEAST_BETA, inside.gamma_s_per_byte),
            "curves": {},
        },
        "node": {
            "ranks": k,
            "gb_per_s": 1e-9 / max(LEAST_BETA, inside.beta_s_per_byte),
            "alpha_us": 1e6 * inside.alpha_s,
        },
        "network": network,
        "engine": {"name": "gloo", "base_us": 0.0, "sums": ["ring"], "in_parts": True},
        "uncertainty": {"device": 0.1, "bandwidth": 1.2, "latency": 1.5, "jitter": 1.0},
        "sources": {
            **dict.fromkeys(["node.ranks", "node.gb_per_s", "node.alpha_us", "device.memory_gb_per_s"], PLAN),
            **dict.fromkeys(["network.gbps", "network.alpha_us"], PLAN if between else NO_NETWORK),
            **dict.fromkeys(["network.nics", "network.efficiency"], "what is measured is what arrives"),
            **dict.fromkeys(["device.memory_gb", "engine.base_us"], "no limit, no cost of its own"),
            "uncertainty.device": "assumed",
            "uncertainty.bandwidth": "assumed",
            "uncertainty.latency": "assumed",
            "uncertainty.jitter": "none is simulated",
        },
    }


FOLDER = resources.files("megabatch.simulate")
THIS = "this.json"  # what `megabatch plan` has measured last
SUFFIXES = (".toml", ".json")
MAX_BASES = 8
ABSURD = 1e12  # no number in a cluster file is as large
LONGEST_RULE = 200  # of why: it may name a key of the file
LONGEST_SHOWN = 60  # characters of what is refused

Tables = dict[str, Any]


def preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in (FOLDER / "clusters").iterdir())


def is_preset(name: str) -> bool:
    return name in preset_names()


def load_cluster(name: str, overrides: Sequence[str] = ()) -> Cluster:
    """A preset's name or a TOML file."""
    tables = with_device(read_cluster(name), name)
    before = copy.deepcopy(tables)
    for override in overrides:
        apply(tables, override, name)
    tables.setdefault("name", Path(name).stem)
    try:
        cluster = msgspec.convert(tables, Cluster)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, UserError) else UserError(explain(error, name, tables, before)) from None
    return cluster


def explain(error: msgspec.ValidationError, name: str, tables: Tables, before: Tables) -> str:
    """The key with its value, the rule, and what the file itself has."""
    rule, _, path = str(error).partition(" - at `$.")
    key = path.rstrip("`")
    rule = abbreviated(f"{rule[:1].lower()}{rule[1:]}".replace("`", ""), LONGEST_RULE)
    value, own = (value_at(each, key) for each in (tables, before))
    if value is None or isinstance(value, dict | list):
        return f"{name}: {rule}{f' in {key}' if key else ''}; the presets show how such a file looks"
    remedy = (
        f"{name} itself has {key}={own}"
        if isinstance(own, int | float | str) and own != value
        else f"change it in {name}"
    )
    return f"{key}={abbreviated(str(value))}: {rule}; {remedy}"


def value_at(tables: Tables, key: str) -> Any:
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def read_cluster(name: str, depth: int = 0) -> Tables:
    if is_preset(name):
        tables = parse((FOLDER / "clusters" / f"{name}.toml").read_text("utf-8"), name)
    elif name == "this":
        folder = cache_folder()
        path = folder / THIS if folder else None
        if path is None or not path.is_file():
            raise UserError("--cluster this: nothing was measured here yet; first: megabatch plan RECIPE")
        tables = read_own(path)
    elif Path(name).suffix in SUFFIXES:
        tables = read_own(Path(name))
    else:
        known = preset_names()
        raise UserError(
            f"--cluster {name!r} is none of {', '.join(known)}, nor a .toml file, nor a .json of megabatch plan; "
            f"nearest: --cluster {nearest(name, known)}"
        )
    base = tables.pop("base", None)
    if base is None:
        return tables
    if depth == MAX_BASES:
        raise UserError(f"{name}: base={abbreviated(repr(base))} leads to more than {MAX_BASES} files; is it a circle?")
    return merged(read_cluster(beside(name, str(base)), depth + 1), tables, name)


def beside(name: str, base: str) -> str:
    """A file's base is relative to the file; a preset's is a preset."""
    is_file = Path(base).suffix in SUFFIXES and not is_preset(base)
    return str(Path(name).parent / base) if is_file else base


def read_own(path: Path) -> Tables:
    """A cluster file, or what `megabatch plan --json` has written."""
    try:
        if path.suffix == ".json":
            return describe_measured(decode_tuning(read_regular(path, MAX_BYTES)))
        return parse(read_text(path, LONGEST_BYTES), str(path))
    except OSError as error:
        raise UserError(f"--cluster {path}: cannot be read ({error.strerror}); give another file") from None
    except NotText as error:
        raise UserError(f"--cluster {path}: {error}; give another file") from None
    except Undecodable as error:
        raise UserError(
            f"--cluster {path} is no plan ({error}); write one: megabatch plan RECIPE --json FILE"
        ) from None


def parse(text: str, name: str) -> Tables:
    try:
        tables = parse_toml(text)
    except NotToml as error:
        raise UserError(f"{name} is not TOML: {error}") from None
    for key, value in numbers(tables):
        require_sane(key, value)
    return tables


def numbers(tables: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(tables, dict):
        for name, value in tables.items():
            yield from numbers(value, f"{prefix}.{name}" if prefix else name)
    elif isinstance(tables, list):
        for value in tables:
            yield from numbers(value, prefix)
    elif isinstance(tables, int | float) and not isinstance(tables, bool):
        yield prefix, tables


def require_sane(key: str, value: float) -> None:
    if not abs(value) <= ABSURD:  # nor is nan
        # An integer of TOML may be too large for a float, and for Python to print.
        shown = f"{value:g}" if isinstance(value, float) else f"{'-' * (value < 0)}1e{math.log10(abs(value)):.0f}"
        raise UserError(f"{key}={shown} is not a number that a cluster can have; give a finite one, at most {ABSURD:g}")


def merged(below: Tables, above: Tables, name: str) -> Tables:
    """Tables are merged, everything else is replaced, and its source with it: where `above` gives none, by its name."""
    result = merged_tables(below, above)
    sources, given = result.get("sources"), above.get("sources", {})
    if isinstance(sources, dict) and isinstance(given, dict):
        replaced = set(leaves(above)) & sources.keys()
        result["sources"] = sources | dict.fromkeys(replaced, f"set in {name}") | given
    return result


def merged_tables(below: Tables, above: Tables) -> Tables:
    result = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged_tables(result[name], value) if both else value
    return result


def leaves(tables: Tables, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all that is no table."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def with_device(tables: Tables, name: str = "the cluster's file") -> Tables:
    device = tables.get("device")
    like = device.pop("like", None) if isinstance(device, dict) else None
    if like is None:
        return tables
    known = [entry.name.removesuffix(".toml") for entry in (FOLDER / "devices").iterdir()]
    if like not in known:
        raise UserError(f"device.like={abbreviated(repr(like))} is none of {', '.join(sorted(known))}")
    shared = parse((FOLDER / "devices" / f"{like}.toml").read_text("utf-8"), like)
    return merged(shared, tables, name)


def apply(tables: Tables, override: str, name: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(
            f"{abbreviated(repr(override))} is not an override; expected section.key=value, such as network.gbps=400"
        )
    if not is_plain(override):
        raise UserError(f"{abbreviated(override)}: expected text without control characters; leave them out")
    known = keys_of_cluster()
    if key not in known:
        rule = f"a cluster has no {abbreviated(key)}" if "." in key else "overrides of a cluster are section.key=value"
        meant = [name for name in known if name.endswith(f".{key}")] if "." not in key else [nearest(key, known)]
        remedy = f"nearest: {meant[0]}" if meant else "for example network.gbps=400"
        raise UserError(f"{abbreviated(override)}: {rule}; {remedy}")
    value = parse_value(text)
    for _, number in numbers(value):
        require_sane(key, number)
    *sections, last = key.split(".")
    put(tables, sections, last, value)
    put(tables, ["sources"], key, "given with the command")


def put(tables: Tables, sections: Sequence[str], key: str, value: Any) -> None:
    """Unless the file has something else where a table should be, which is then refused with the whole."""
    table: Any = tables
    for section in sections:
        table = table.setdefault(section, {}) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table[key] = value


def parse_value(text: str) -> Any:
    """As TOML has it, or text; 2e0 is as good an integer as 2."""
    try:
        value = parse_toml(f"value = {text}")["value"]
    except NotToml:
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value


def abbreviated(text: str, longest: int = LONGEST_SHOWN) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."


@cache
def keys_of_cluster() -> dict[str, inspect.Type]:
    """Dotted names of everything that can be overridden, with its type."""
    return {key: kind for key, kind in typed_keys(inspect.type_info(Cluster)) if "." in key}


def typed_keys(section: inspect.Type, prefix: str = "") -> Iterator[tuple[str, inspect.Type]]:
    assert isinstance(section, inspect.StructType)
    for member in section.fields:
        # A section that may be left out is a union with None.
        kinds = member.type.types if isinstance(member.type, inspect.UnionType) else (member.type,)
        inner = next((kind for kind in kinds if isinstance(kind, inspect.StructType)), None)
        name = prefix + member.encode_name
        if inner:
            yield from typed_keys(inner, f"{name}.")
        else:
            yield name, member.type
