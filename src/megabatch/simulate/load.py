"""Read cluster files: presets by name and user files by path, with `section.key=value` overrides.

A TOML file can extend another (`base = "dgx-a100"`, or a file in the same folder) and then contains only the
differences.  `device.like = "a100-mxnet"` uses a device of devices/, so that clusters share its points.

A JSON file is a plan measured by `megabatch plan`; `this` is the newest plan of this machine.  Its links were
measured while all k ranks of a node communicate, so the network card of a node carries k times the bandwidth of one
rank.  A plan has no device speeds; these come from a profile (`--profile`).
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from megabatch.errors import LONGEST_QUOTED, UserError, nearest, plain_rule
from megabatch.io.disk import cache_folder
from megabatch.io.reading import NotText, Undecodable, read_regular, read_text
from megabatch.io.toml import LONGEST_BYTES, NotToml, Override, parse_override, parse_toml, set_dotted
from megabatch.planning.cost import Link
from megabatch.planning.tuning import MAX_BYTES, Tuning, decode_tuning
from megabatch.simulate.cluster import Cluster
from megabatch.text import one_line

FOLDER = resources.files("megabatch.simulate")
THIS = "this.json"  # the newest plan of this machine
SUFFIXES = (".toml", ".json")
MAX_BASES = 8
MAX_NUMBER = 1e12
LONGEST_RULE = 200  # characters of a rule, which may contain a key of the file

LEAST_BETA = 1e-12  # s/B, if a link was too fast to measure
ASSUMED_GBPS, ASSUMED_ALPHA_US = 1.0, 100.0
PLAN = "measured by megabatch plan"
NO_NETWORK = "assumed: the plan was measured on one node; set it, for example network.gbps=10"

Tables = dict[str, Any]


def measured_cluster(tuning: Tuning) -> Tables:
    """Return a measured plan as the tables of a cluster file."""
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
        "about": f"{shape.num_nodes} nodes of {k} ranks, as measured",
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
            **dict.fromkeys(["network.nics", "network.efficiency"], "included in the measured network.gbps"),
            **dict.fromkeys(["device.memory_gb", "engine.base_us"], "no limit and no extra cost"),
            "uncertainty.device": "assumed",
            "uncertainty.bandwidth": "assumed",
            "uncertainty.latency": "assumed",
            "uncertainty.jitter": "no jitter is simulated",
        },
    }


def preset_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in (FOLDER / "clusters").iterdir())


def is_preset(name: str) -> bool:
    return name in preset_names()


def load_cluster(name: str, overrides: Sequence[str] = ()) -> Cluster:
    """Return the cluster of a preset's name, `this`, or a file."""
    tables = with_device(read_cluster(name), name)
    before = copy.deepcopy(tables)
    for override in overrides:
        apply(tables, override, name)
    tables.setdefault("name", Path(name).stem)
    try:
        return msgspec.convert(tables, Cluster)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, UserError) else UserError(explain(error, name, tables, before)) from None


def explain(error: msgspec.ValidationError, name: str, tables: Tables, before: Tables) -> str:
    """Return a message with the key and its value, the rule, and the value in the file."""
    rule, _, path = str(error).partition(" - at `$.")
    key = path.rstrip("`")
    rule = one_line(plain_rule(rule), LONGEST_RULE)
    value, own = (value_at(each, key) for each in (tables, before))
    if value is None or isinstance(value, dict | list):
        return f"{name}: {rule}{f' in {key}' if key else ''}; compare with a preset in simulate/clusters/"
    remedy = (
        f"{name} itself has {key}={own}"
        if isinstance(own, int | float | str) and own != value
        else f"change it in {name}"
    )
    return f"{key}={one_line(str(value), LONGEST_QUOTED)}: {rule}; {remedy}"


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
            raise UserError("--cluster this: no plan was measured on this machine yet; run megabatch plan RECIPE first")
        tables = read_user_file(path)
    elif Path(name).suffix in SUFFIXES:
        tables = read_user_file(Path(name))
    else:
        known = preset_names()
        raise UserError(
            f"--cluster {name!r} is not one of {', '.join(known)}, a .toml file or a .json file of megabatch plan; "
            f"nearest: --cluster {nearest(name, known)}"
        )
    base = tables.pop("base", None)
    if base is None:
        return tables
    if depth == MAX_BASES:
        raise UserError(
            f"{name}: base={one_line(repr(base), LONGEST_QUOTED)} extends more than {MAX_BASES} files; "
            "check for a circular base"
        )
    return merged(read_cluster(resolve_base(name, str(base)), depth + 1), tables, name)


def resolve_base(name: str, base: str) -> str:
    """Return a preset's name, or a path relative to the file that names it."""
    is_file = Path(base).suffix in SUFFIXES and not is_preset(base)
    return str(Path(name).parent / base) if is_file else base


def read_user_file(path: Path) -> Tables:
    """Read a cluster file, or a plan written by `megabatch plan --json`."""
    try:
        if path.suffix == ".json":
            return measured_cluster(decode_tuning(read_regular(path, MAX_BYTES)))
        return parse(read_text(path, LONGEST_BYTES), str(path))
    except OSError as error:
        raise UserError(f"--cluster {path}: cannot be read ({error.strerror}); give another file") from None
    except NotText as error:
        raise UserError(f"--cluster {path}: {error}; give another file") from None
    except Undecodable as error:
        raise UserError(
            f"--cluster {path} is not a plan ({error}); write one: megabatch plan RECIPE --json FILE"
        ) from None


def parse(text: str, name: str) -> Tables:
    try:
        tables = parse_toml(text)
    except NotToml as error:
        raise UserError(f"{name} is not TOML: {error}") from None
    for key, value in numbers(tables):
        require_finite(key, value)
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


def require_finite(key: str, value: float) -> None:
    if not abs(value) <= MAX_NUMBER:  # also true for nan
        # A TOML integer can be too large for a float and for Python to print.
        shown = f"{value:g}" if isinstance(value, float) else f"{'-' * (value < 0)}1e{math.log10(abs(value)):.0f}"
        raise UserError(f"{one_line(key, LONGEST_RULE)}={shown}: expected a finite number, at most {MAX_NUMBER:g}")


def merged(below: Tables, above: Tables, name: str) -> Tables:
    """Merge tables and replace other values with those of `above`.

    A replaced value without a source in `above` gets the file's name as its source.
    """
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
    """Yield the dotted keys of all values that are not tables."""
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
        raise UserError(f"device.like={one_line(repr(like), LONGEST_QUOTED)} is not one of {', '.join(sorted(known))}")
    shared = parse((FOLDER / "devices" / f"{like}.toml").read_text("utf-8"), like)
    return merged(shared, tables, name)


def parse_cluster_override(text: str, is_string: Callable[[str], bool] = lambda key: False) -> Override:
    """Parse `section.key=value` with finite numbers; 2e0 is an integer."""
    override = parse_override(text, is_string, example="network.gbps=400")
    value = override.value
    for _, number in numbers(value):
        require_finite(override.key, number)
    return override._replace(value=int(value)) if isinstance(value, float) and value.is_integer() else override


def apply(tables: Tables, override: str, name: str) -> None:
    known = keys_of_cluster()
    _, key, value = parse_cluster_override(override)
    if key not in known:
        shown = one_line(key, LONGEST_QUOTED)
        rule = f"a cluster has no {shown}" if "." in key else "overrides of a cluster are section.key=value"
        meant = [name for name in known if name.endswith(f".{key}")] if "." not in key else [nearest(key, known)]
        remedy = f"nearest: {meant[0]}" if meant else "for example network.gbps=400"
        raise UserError(f"{one_line(override, LONGEST_QUOTED)}: {rule}; {remedy}")
    # If the file has another value in place of a table, the conversion to Cluster rejects it.
    set_dotted(tables, key, value)
    if isinstance(tables.setdefault("sources", {}), dict):
        tables["sources"][key] = "given with the command"


@cache
def keys_of_cluster() -> dict[str, inspect.Type]:
    """Return the dotted keys that can be overridden, with their types."""
    return {key: kind for key, kind in typed_keys(inspect.type_info(Cluster)) if "." in key}


def typed_keys(section: inspect.Type, prefix: str = "") -> Iterator[tuple[str, inspect.Type]]:
    assert isinstance(section, inspect.StructType)
    for member in section.fields:
        # An optional section is a union with None.
        kinds = member.type.types if isinstance(member.type, inspect.UnionType) else (member.type,)
        inner = next((kind for kind in kinds if isinstance(kind, inspect.StructType)), None)
        name = prefix + member.encode_name
        if inner:
            yield from typed_keys(inner, f"{name}.")
        else:
            yield name, member.type
