"""The files of a run (checkpoints, weights, rows, summary and card), from a small run trained for this purpose."""

import hashlib
import io
import json
import zipfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.inference.classifier import load
from megabatch.models.weights import read_weights
from megabatch.ranks.world import current_rank
from megabatch.runs.comparison import add_up, compare
from megabatch.runs.files import CHECKPOINTS, CONFIG, METRICS, MODEL, SUMMARY, WEIGHTS
from megabatch.runs.model_card import METADATA
from megabatch.runs.reader import epoch_losses, last_record, length_up_to, list_runs, read_records
from megabatch.text import is_plain
from megabatch.training.checkpoint.card import pixels_of, read_card
from megabatch.training.checkpoint.format import DESCRIPTION, STATE
from megabatch.training.checkpoint.resume import Start, newest_checkpoint, read_start
from megabatch.training.checkpoint.state import restore_training_state
from megabatch.training.parts import Training
from megabatch.training.prepare import prepare
from megabatch.training.run import train_and_record
from megabatch_lab.fuzz.formats import Bench, Files, Format, read_back
from megabatch_lab.fuzz.mutations import corrupt_json, corrupt_tree, nonsense
from megabatch_lab.fuzz.texts import is_json

SMALL = (
    "model.name=small_cnn",
    "model.options.width=4",
    "data.source=synthetic",
    "data.image_size=12",
    "data.synthetic.train=64",
    "data.synthetic.test=16",
    "data.synthetic.classes=3",
    "batch.global=16",
    "batch.micro=8",
    "precision.name=fp16",
    "optim.name=lars",
    "train.steps=4",
    "checkpoint.every_steps=2",
    "checkpoint.keep=3",
    "run.threads=1",
    "run.device=cpu",
)
MEASURED = ("_s", "_mb", "_share", "data_wait", "costs")  # suffixes of measured fields
CHECKPOINT_NAMES = (
    "step-junk",
    "step--1",
    "step-",
    "step-00000004 (copy)",
    "step-99999999999999999999",
    "last",
    "best",
)
PICKLED = "weights.pth"
EVIL = "evil"  # a file that code in a pickle would create
EVIL_PICKLE = b"cbuiltins\nopen\n(S'" + EVIL.encode() + b"'\nS'w'\ntR."


class Trained(NamedTuple):
    folder: Path
    training: Training


@cache  # a process can have only one process group
def train_small(scratch: Path, stack: ExitStack) -> Trained:
    folder = scratch / "run"
    config = load_config("smoke", [*SMALL, f"run.dir={folder}"])
    ready = stack.enter_context(prepare(config, current_rank(), resume="never"))
    train_and_record(ready.config, ready.start, ready.training)
    return Trained(folder, ready.training)


def without_times(document: bytes) -> bytes:
    """Replace measured values in a JSON document by a constant, so that inputs are reproducible."""
    return json.dumps(replace_times(json.loads(document))).encode()


def replace_times(value: Any, is_time: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: replace_times(member, is_time or key.endswith(MEASURED)) for key, member in value.items()}
    if isinstance(value, list):
        return [replace_times(member, is_time) for member in value]
    return 0.25 if is_time and isinstance(value, float) else value


def set_up_checkpoints(scratch: Path, stack: ExitStack) -> Bench:
    run = train_small(scratch, stack)
    saved = {f"{CHECKPOINTS}/{name}": content for name, content in read_back(run.folder / CHECKPOINTS).items()}
    both = {name: content for name, content in saved.items() if "/step-" in name}
    both |= {name: without_times(content) for name, content in both.items() if name.endswith(DESCRIPTION)}
    newest = {name: content for name, content in both.items() if name.startswith(newest_folder(both))}

    def read(folder: Path) -> None:
        problems: list[str] = []
        checkpoint = read_start(Start(folder, newest_checkpoint(folder)), problems.append, run.training)
        if checkpoint:
            restore_training_state(run.training, checkpoint.state)
        if problems:
            raise UserError(problems[0])

    return Bench([newest, both], read)


def newest_folder(files: Files) -> str:
    return max(name.rpartition("/")[0] for name in files)


def corrupt_checkpoint(files: Files, rng: Random) -> Files:
    newest = newest_folder(files)
    description, state = f"{newest}/{DESCRIPTION}", f"{newest}/{STATE}"
    what = rng.random()
    if what < 0.3:
        return files | {description: corrupt_json(files[description], rng)}
    if what < 0.4:
        renamed = f"{CHECKPOINTS}/{rng.choice(CHECKPOINT_NAMES)}"
        others = {name: content for name, content in files.items() if not name.startswith(newest)}
        return others | {f"{renamed}/{DESCRIPTION}": files[description], f"{renamed}/{STATE}": files[state]}
    if what < 0.45:
        return (
            {CHECKPOINTS: b""}
            if rng.random() < 0.3
            else files | {f"{CHECKPOINTS}/{rng.choice(CHECKPOINT_NAMES)}": b"x"}
        )
    tensors = corrupt_tensors(files[state], rng)
    fields = json.loads(files[description]) | {"checksum": hashlib.sha256(tensors).hexdigest()}
    return files | {state: tensors, description: json.dumps(fields).encode()}


def corrupt_tensors(content: bytes, rng: Random) -> bytes:
    """Corrupt the header length, the header entry of one tensor, or the values of that tensor."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:begin])
    data = bytearray(content[begin:])
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    what = rng.randrange(8)
    if what == 0:
        length = rng.choice((0, 1, begin - 9, begin, 2**31, 2**63 - 1, 2**64 - 1))
        return length.to_bytes(8, "little") + content[8:]
    if what == 1:
        entry["dtype"] = rng.choice(("I8", "F16", "BF16", "F64", "BOOL", "F4", "", 7))
    elif what == 2:  # of the same size or not
        entry["shape"] = rng.choice(([*entry["shape"], 1], entry["shape"][::-1], [-1], [2**62, 4], [0], [2**70]))
    elif what == 3:
        entry["data_offsets"] = rng.choice(([0, 4], [-4, 0], [0, 2**63], [8, 4], entry["data_offsets"] * 2, []))
    elif what == 4:
        header[str(nonsense(rng))] = header.pop(name)
    elif what == 5:
        corrupt_tree(header, rng)
    elif what == 6:
        start, end = entry["data_offsets"]
        data[start:end] = (b"\xff" if rng.random() < 0.5 else b"\0") * (end - start)  # NaN, or 0
    else:
        del header[name]
    text = json.dumps(header).encode("utf-8", "replace")
    return len(text).to_bytes(8, "little") + text + bytes(data)


def has_checkpoint_header(files: Files) -> bool:
    return all(is_json(content) for name, content in files.items() if name.endswith(DESCRIPTION)) and len(files) > 1


def set_up_weights(scratch: Path, stack: ExitStack) -> Bench:
    run = train_small(scratch, stack)
    content = io.BytesIO()
    torch.save(run.training.master_weights.state_dict(), content)
    return Bench([{WEIGHTS: (run.folder / WEIGHTS).read_bytes()}, {PICKLED: content.getvalue()}], read_weights_file)


def read_weights_file(folder: Path) -> None:
    try:
        for tensor in read_weights(next(folder.iterdir())).values():
            tensor.float().sum()
    finally:
        assert not Path(EVIL).exists(), "a pickle executed code"


def corrupt_weights(files: Files, rng: Random) -> Files:
    if WEIGHTS in files:
        return {WEIGHTS: corrupt_tensors(files[WEIGHTS], rng)}
    content = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(files[PICKLED])) as found, zipfile.ZipFile(content, "w") as made:
        for listed in found.infolist():  # contains the time, too
            name, member = listed.filename, found.read(listed)
            if name.endswith("data.pkl") and rng.random() < 0.7:
                at = rng.randrange(len(member))
                changed = (EVIL_PICKLE, EVIL_PICKLE[:-1] + member, member[:at] + rng.randbytes(1) + member[at + 1 :])
                member = rng.choice(changed)
            if rng.random() < 0.95:
                made.writestr(zipfile.ZipInfo(name), member)
    return {PICKLED: EVIL_PICKLE if rng.random() < 0.05 else content.getvalue()}


def has_weights_header(files: Files) -> bool:
    if WEIGHTS in files:
        content = files[WEIGHTS]
        return is_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return any(zipfile.is_zipfile(io.BytesIO(content)) for content in files.values())


def files_of_run(scratch: Path, stack: ExitStack, *names: str) -> Files:
    folder = train_small(scratch, stack).folder
    files = {name: (folder / name).read_bytes() for name in names}
    if METRICS in files:
        files[METRICS] = b"".join(without_times(row) + b"\n" for row in files[METRICS].splitlines())
    return files | {name: without_times(files[name]) for name in names if name in (SUMMARY, MODEL)}


def set_up_rows(scratch: Path, stack: ExitStack) -> Bench:
    return Bench([files_of_run(scratch, stack, METRICS)], read_rows)


def read_rows(folder: Path) -> None:
    length_up_to(folder / METRICS, step=3)
    last_record(folder)
    for record in read_records(folder):
        assert record.step >= 0 and record.epoch >= 0
    epoch_losses(folder)
    add_up(folder, batch=16, target=0.5)


def corrupt_rows(files: Files, rng: Random) -> Files:
    rows = files[METRICS].splitlines()
    at = rng.randrange(len(rows))
    rows[at] = corrupt_json(rows[at], rng) if rng.random() < 0.8 else rows[at] * rng.choice((2, 1000))
    return {METRICS: b"\n".join(rows) + b"\n"}


def set_up_summaries(scratch: Path, stack: ExitStack) -> Bench:
    files = files_of_run(scratch, stack, CONFIG, METRICS, SUMMARY)
    return Bench([{f"run-001/{name}": content for name, content in files.items()}], read_runs)


def read_runs(folder: Path) -> None:
    found = list_runs(folder)
    for listing in found:
        assert listing.summary is None or listing.summary.steps >= 0
    compare([listing.path for listing in found], target=0.5)


def corrupt_summary(files: Files, rng: Random) -> Files:
    name = f"run-001/{SUMMARY}"
    return files | {name: corrupt_json(files[name], rng)}


def set_up_models(scratch: Path, stack: ExitStack) -> Bench:
    return Bench([files_of_run(scratch, stack, MODEL, WEIGHTS)], read_model)


def read_model(folder: Path) -> None:
    """Read a model like `predict`, and its card like a resumed run."""
    card = read_card(folder)
    if card:
        pixels_of(card)
    classifier = load(folder)
    shape = (classifier.card.num_channels, classifier.card.image_size, classifier.card.image_size)
    scores = classifier(torch.zeros(shape, dtype=torch.uint8))
    assert scores.shape == (1, len(classifier.classes)) and all(map(is_plain, classifier.classes))


def corrupt_model(files: Files, rng: Random) -> Files:
    """Corrupt the card file, the card inside the weights, or the weights."""
    what = rng.random()
    if what < 0.2:
        return files | {MODEL: corrupt_json(files[MODEL], rng)}
    if what < 0.4:
        return files | {WEIGHTS: corrupt_tensors(files[WEIGHTS], rng)}
    content = files[WEIGHTS]
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    metadata = header["__metadata__"]
    metadata[METADATA] = corrupt_json(metadata[METADATA].encode(), rng).decode("utf-8", "replace")
    text = json.dumps(header).encode()
    return files | {WEIGHTS: len(text).to_bytes(8, "little") + text + content[begin:]}


RUNS = {
    "checkpoint": Format(set_up_checkpoints, corrupt_checkpoint, has_checkpoint_header),
    "weights": Format(set_up_weights, corrupt_weights, has_weights_header),
    "metrics": Format(set_up_rows, corrupt_rows, lambda files: all(map(is_json, files[METRICS].splitlines()))),
    "summary": Format(set_up_summaries, corrupt_summary, lambda files: is_json(files[f"run-001/{SUMMARY}"])),
    "model": Format(set_up_models, corrupt_model, lambda files: has_weights_header({WEIGHTS: files[WEIGHTS]})),
}
