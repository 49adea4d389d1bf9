"""Recipes, overrides, studies, all-reduce plans and tables of labels."""

import json
import tomllib
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import get_args

import msgspec

from megabatch.config.loading import load_config, silent
from megabatch.config.recipes import recipe_names
from megabatch.config.resolve import decisive_settings
from megabatch.config.schema import FIELDS
from megabatch.data.catalog import with_label_sets
from megabatch.data.sources.files import EncodedDataset
from megabatch.data.sources.table import read_table
from megabatch.experiments.design import TimeDesign, known_studies, read_any_design
from megabatch.experiments.plan import search_so_far, seeds_of
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.choosing import choose
from megabatch.planning.cost import Link
from megabatch.planning.pipeline import Gradient, RecordedBackward
from megabatch.planning.topology import Axis, regular
from megabatch.planning.tuning import Tuning
from megabatch.runs.files import PLAN
from megabatch.runs.reader import read_plan
from megabatch.text import is_plain
from megabatch_lab.fuzz.formats import Files, Format, by_functions
from megabatch_lab.fuzz.mutations import DEPTH, corrupt_json

RECIPE, OVERRIDE, TABLE = "recipe.toml", "override", "labels.csv"
# In TOML syntax.
VALUES = (
    *("-1", "0", "1", "1e308", "-1e308", "nan", "inf", "1" + "0" * 30, "9" * 5000, "0x7fffffffffffffff", "1e-320"),
    *(
        "''",
        "'x'",
        "'..'",
        "'.'",
        "'/'",
        "'-x'",
        '"\\u0000"',
        '"\\u001b[31m"',
        '"a\\nb"',
        "'[bold]x[/bold]'",
        f"'{'x' * 9999}'",
    ),
    *("true", "[]", "{}", "[[]]", "{a={}}", "[1,'x',[]]", "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00"),
    *("[" * DEPTH + "]" * DEPTH, "[" * 500, "{a=" * 900 + "1" + "}" * 900),
)
KEYS = (
    "x",
    "a.b.c",
    "''",
    "x" * 200_000,
    ".".join("a" * 5000),
    '"\\u001b[31m"',
    '"a b"',
    "name",
    "optim",
    "run.dir",
    "-",
)


def recipes() -> list[Files]:
    return [{RECIPE: load_config(name, needs_source=False).to_toml().encode()} for name in recipe_names()]


def corrupt_recipe(files: Files, rng: Random) -> Files:
    lines = files[RECIPE].decode().splitlines()
    settings = [at for at, line in enumerate(lines) if " = " in line]
    at = rng.choice(settings)
    key, _, value = lines[at].partition(" = ")
    what = rng.randrange(8)
    if what < 4:
        lines[at] = f"{key} = {rng.choice(VALUES)}"
    elif what == 4:
        lines[at] = f"{rng.choice(KEYS)} = {value}"
    elif what == 5:
        lines.insert(at, rng.choice((f"[{rng.choice(KEYS)}]", f"[[{rng.choice(KEYS)}]]", lines[at])))
    elif what == 6:
        del lines[at : at + rng.choice((1, 1, 10))]
    else:
        lines.insert(0, f"{rng.choice((*KEYS, *FIELDS))} = {rng.choice(VALUES)}")
    text = "\n".join(lines)
    return {RECIPE: text.encode("utf-16" if rng.random() < 0.02 else "utf-8-sig" if rng.random() < 0.02 else "utf-8")}


def is_toml(files: Files) -> bool:
    try:
        tomllib.loads(files[RECIPE].decode())
    except (ValueError, RecursionError):
        return False
    return True


def read_recipe_file(folder: Path) -> None:
    config = load_config(str(folder / RECIPE), report=silent, needs_source=False)
    (folder / RECIPE).write_text(config.to_toml())
    again = load_config(str(folder / RECIPE), report=silent, needs_source=False)
    assert again == config, "an accepted recipe changes when it is written and read again"
    decisive_settings(config)


def studies() -> list[Files]:
    return [{RECIPE: design.read_bytes()} for design in known_studies().values()]


def read_study_file(folder: Path) -> None:
    """Read a study and compute its plan, without its recipes, which are a separate format."""
    design = read_any_design(str(folder / RECIPE))
    assert design.num_trials > 0
    if isinstance(design, TimeDesign):
        return
    assert design.stages()
    for arm in design.arms:
        seeds_of(design, arm, {})
        search_so_far(design, arm, {})


def overrides() -> list[Files]:
    return [
        {OVERRIDE: text}
        for text in (b"batch.global=512", b"run.dir=x", b"optim.learning_rate=0.1", b"model.options={}")
    ]


def corrupt_override(files: Files, rng: Random) -> Files:
    key = rng.choice((*FIELDS, *FIELDS, *KEYS))
    return {OVERRIDE: f"{key}={rng.choice(VALUES)}".encode()}


def read_override(folder: Path) -> None:
    text = (folder / OVERRIDE).read_bytes().decode("utf-8", "surrogateescape")  # like Python's sys.argv
    config = load_config("fashion", [text], report=silent)
    msgspec.toml.encode(msgspec.toml.decode(config.to_toml()))


def plans() -> list[Files]:
    sizes = [4_000, 1_000_000, 64, 2_000_000]
    ready_s = [size / 3e7 for size in accumulate(sizes)]
    backward = RecordedBackward(
        [f"layer.{at}" for at in range(4)], [Gradient(4 * size, "fp32") for size in sizes], ready_s
    )
    links = {axis: Link(1e-5, 1e-9, 1e-10) for axis in get_args(Axis)}
    made = []
    for nodes, ranks in ((2, 2), (1, 4)):
        topology = regular(nodes, ranks)
        candidates = [plan for algorithm in ALGORITHMS.values() if (plan := algorithm(topology.shape, "bf16"))]
        made.append({PLAN: msgspec.json.encode(choose(backward, candidates, topology, links, bucket_mb=None))})
    return made


def read_stored_plan(folder: Path) -> None:
    use_plan(read_plan(folder))


def use_plan(tuning: Tuning) -> list[object]:
    """Compute everything that is derived from an accepted plan."""
    of_buckets = [
        (bucket.candidate.expected_costs, bucket.num_bytes, bucket.measured_places) for bucket in tuning.buckets
    ]
    times = [tuning.passages, tuning.predicted_s, tuning.exposed_s]
    return [*of_buckets, *times, tuning.bytes_crossing, tuning.rounding, tuning.algorithms]


def is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def tables() -> list[Files]:
    rows = [f"{name}/{number}.jpg,{name}" for name in ("cat", "dög") for number in range(6)]
    splits = [f"{row},{'val' if number % 3 else 'train'}" for number, row in enumerate(rows)]
    lists = [f'"/photos/{number}, a.png",cat;dog' for number in range(5)]
    contents = (rows, ["path,label", *rows], ["path,label,split", *splits], ["path,label", *lists, "b.png,"])
    return [{TABLE: "\n".join(lines).encode()} for lines in contents]


CELLS = (
    "",
    '"',
    '""',
    "\0",
    "\x1b[31m",
    "a\nb",
    "\u2028",
    ";",
    ";;;",
    "-1",
    "9" * 999,
    "x" * 200_000,
    "val",
    "path,label",
    "\r",
)


def corrupt_table(files: Files, rng: Random) -> Files:
    lines = files[TABLE].decode().split("\n")
    for _ in range(rng.choice((1, 1, 5))):
        at = rng.randrange(len(lines))
        cells = lines[at].split(",")
        cells[rng.randrange(len(cells))] = rng.choice(CELLS)
        what = rng.randrange(4)
        lines[at] = lines[rng.randrange(len(lines))] if what == 0 else ",".join(cells * (1 + (what == 1)))
    text = rng.choice(("\n", "\n", "\r\n", "\r")).join(lines)
    return {TABLE: text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16")))}


def read_both_ways(folder: Path) -> None:
    """Read a table with lists of labels and, if it has no empty label, with one label per image."""
    data = with_label_sets(read_table(folder / TABLE, multi_label=True))
    if data.label_sets is not None and data.label_sets.any(1).all():
        require_meaning(read_table(folder / TABLE))
    require_meaning(data)


def require_meaning(data: EncodedDataset) -> None:
    sets = data.label_sets
    classes = len(data.class_names)
    assert classes and all(map(is_plain, data.class_names)) and (sets is None or sets.shape[1] == classes)
    for files in filter(None, (data.train, data.test)):
        assert files.labels.min() >= 0 and files.labels.max() < (classes if sets is None else len(sets))
        assert all(is_plain(files.where(number)) for number in range(len(files)))


TEXTS = {
    "csv": Format(by_functions(tables, read_both_ways), corrupt_table, lambda files: b"," in files[TABLE][:64]),
    "toml": Format(by_functions(recipes, read_recipe_file), corrupt_recipe, is_toml),
    "study": Format(by_functions(studies, read_study_file), corrupt_recipe, is_toml),
    "override": Format(by_functions(overrides, read_override), corrupt_override, lambda files: b"=" in files[OVERRIDE]),
    "plan": Format(
        by_functions(plans, read_stored_plan),
        lambda files, rng: {PLAN: corrupt_json(files[PLAN], rng)},
        lambda files: is_json(files[PLAN]),
    ),
}
