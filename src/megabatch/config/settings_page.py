"""The reference of all settings, as the schema has them: for `megabatch settings`, and as docs/settings.md."""

import re
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from megabatch.config.schema import FIELDS, PREEMPT_SIGNALS
from megabatch.models.catalog import MODELS
from megabatch.optim.lars import VARIANTS
from megabatch.optim.optimizers import OPTIMIZERS
from megabatch.optim.schedules import DECAYS
from megabatch.planning.algorithms import ALGORITHMS, ON_REQUEST
from megabatch.precision.policy import PRECISIONS
from megabatch.ranks.backends import BACKENDS

# What each setting means: the one place from which `megabatch settings` and docs/settings.md are written.
#
# A text is Markdown of one line, and its links are relative to docs/.  Type, bounds, choices and default are not said
# here: `reference.py` takes them from the schema.

MEANINGS = {
    "name": (
        "of the recipe, and of its runs: `runs/<name>-<nnn>`; up to 100 letters, digits, `_`, `-` and `.`, and no `-` "
        "or `.` first"
    ),
    "about": "one line for `megabatch recipes`",
    "seed": "of the initial weights, the order of samples, crops, flips and dropout",
    "model.name": (
        "one of ours, or your own as `package.module:factory`; `alexnet` and `alexnet_bn` take images from 39 pixels, "
        "`small_alexnet_bn` has an eighth of their channels, for 28 pixels"
    ),
    "model.options": "keyword arguments of the factory, such as `model.options.width=32`",
    "model.weights": (
        "what the model starts from: a `.safetensors`, `.pth` or `.pt` file, or the folder of another run; see "
        "[weights](use-weights.md)"
    ),
    "model.freeze": (
        'modules that are not trained and compute as in evaluation, such as `model.freeze=["conv1", "bn1", "layer1"]`'
    ),
    "model.channels_last": (
        "the memory order of images and kernels; `auto` is true for our models and false for "
        "[your own](recipes.md#your-own-model)"
    ),
    "model.compile": "`torch.compile` of the network, for training: see [GPUs](gpus.md#compile)",
    "data.source": (
        "a folder of class folders, a `.tar`, a folder of tars, a pack (see [images](data.md)); an `.npz` file, a "
        "folder of four IDX files; `fashion-mnist-10k`, `fashion-mnist`, `synthetic`, or `imagenet`, which is the "
        "folder of that name, and need not be there for a plan"
    ),
    "data.also": "further folders and tars, joined by the names of their classes",
    "data.image_size": "pixels of a side; all images are resized to it",
    "data.crop_area": (
        "a random crop takes this share of the image's area, or more; by default nothing is cropped at random"
    ),
    "data.crop_ratio": "of such a crop, width to height, at most, and its inverse at least",
    "data.center_crop": (
        "of the shorter side: the square in the middle that is seen where nothing is cropped at random. `auto` is "
        "0.875, and 1 for images that are [small](data.md#decoding) already"
    ),
    "data.crop_padding": ("zeros around an image before it is cropped back at random; fewer than `data.image_size`"),
    "data.flip": "mirrors half of the images",
    "data.train_per_class": "takes so many training images of each class, before any are held out; by default all",
    "data.validation": (
        "holds out this share of every class of the training images, and tests on it; 0 tests on the source's own test "
        "images, and `auto` does so where it has some and otherwise holds out a tenth"
    ),
    "data.validation_seed": "chooses which images are held out, and which are taken by `data.train_per_class`",
    "data.on_error": "[what to do](data.md#images-that-cannot-be-read) with images that cannot be read",
    "data.skip_limit": "of an epoch's images, that may be skipped",
    "data.max_pixels": "larger images are refused before they are decoded",
    "data.max_file_mb": "larger files, or members of a tar, are not read",
    "data.image_timeout_s": (
        "seconds to read and decode one image, after which it [cannot be read](data.md#images-that-cannot-be-read)"
    ),
    "data.synthetic.train": "training images of the `synthetic` source",
    "data.synthetic.test": "its test images",
    "data.synthetic.classes": "its classes",
    "data.synthetic.channels": "channels of its images",
    "batch.global": "samples of an optimizer step, over all ranks",
    "batch.micro": "samples of one forward and backward pass, and so of one BatchNorm; `batch.global` is a multiple",
    "optim.name": (
        "the optimizer; or your own as `package.module:function`, called with parameter groups and these settings as "
        "[`fit`'s](python.md) is"
    ),
    "optim.learning_rate": "the peak",
    "optim.head_learning_rate": "the peak of the last layer's learning rate, which follows the same schedule",
    "optim.momentum": "of `sgd` and `lars`",
    "optim.nesterov": "Nesterov's form of momentum; `lars` has no such form",
    "optim.weight_decay": "of weights; biases and normalisation layers have none",
    "optim.decay_all": (
        "biases and normalisation layers decay too, which cost AlexNet 1.3 points at 64K (Jia et al. 2018)"
    ),
    "optim.clip_norm": "longest gradient (as one vector); 0 does not clip",
    "optim.variant": "of `lars`: one of [these](recipes.md#lars); `sgd` ignores this and the next two",
    "optim.trust_coefficient": "of `lars`: how far a weight moves at a learning rate of 1, as a share of its norm",
    "optim.eps": "of `lars`: added to the gradient's norm",
    "schedule.warmup_epochs": "epochs of linear warm-up, step by step",
    "schedule.decay": "of the learning rate, after the warm-up",
    "schedule.power": "of `poly`",
    "schedule.end": "the learning rate that the decay runs towards, at most `optim.learning_rate`",
    "loss.label_smoothing": "of the cross-entropy, as torch has it",
    "comm.algorithm": (
        "the all-reduce of gradients; `auto` is the best for each bucket; `ring` is the backend's own, which rounds 16 "
        "bits at every hop; see [communication](communication.md)"
    ),
    "comm.dtype": "of gradients between hosts: `fp32` is unrounded, `fp16` turns the loss scale on",
    "comm.bucket_mb": (
        "gradients are fused into buckets of up to this size, in MiB; `auto`: 25 within one host, and between hosts "
        "whatever ends communication soonest"
    ),
    "comm.timeout_s": (
        "a rank that is stuck for so many seconds is named, and the run ends, or is [restarted](reliability.md); "
        "before the first step is done it has 600 s, and three times what anything took so far"
    ),
    "comm.timeline": (
        "every rank writes a [timeline](clusters.md#what-runs-underneath-backward) of its newest 50 steps"
    ),
    "precision.name": "the number format that is computed in: see [precision](precision.md)",
    "precision.loss_scale": "a fixed loss scale; by default a dynamic one, where gradients pass through fp16",
    "train.epochs": (
        "may be a fraction; steps = floor(epochs x samples / batch.global). Where an override leaves no room for the "
        "recipe's warm-up, the warm-up is shortened [in proportion](recipes.md#shorter-runs)"
    ),
    "train.steps": "[ends the run](recipes.md#shorter-runs) after so many steps, instead of `train.epochs`",
    "train.target_top1": "the accuracy whose time `summary.json` reports",
    "train.evaluate_every": (
        "epochs between evaluations; one follows the last step in any case, and with 0 that is the only one"
    ),
    "train.examples": (
        "pictures of the test images that the newest evaluation was most confidently wrong about, kept in the run "
        "(`mistakes.json`) for its [report](report.md); 0 keeps none"
    ),
    "checkpoint.every_steps": "steps between checkpoints",
    "checkpoint.every_minutes": (
        "minutes between checkpoints; with neither, so often that writing takes 1 % of the time"
    ),
    "checkpoint.keep": "newest checkpoints that are kept; the best is kept besides",
    "run.dir": "the run's folder",
    "run.device": "`auto` is `cuda` where there is one, else `cpu`",
    "run.threads": "threads of a rank",
    "run.decode_threads": "threads of a rank that decode images",
    "run.preempt_signal": (
        "the signal that [a batch system sends](reliability.md) before it takes the host, besides SIGTERM; the run "
        "saves and ends with 128 + its number"
    ),
    "run.compare_every": (
        "steps after which ranks [compare their weights](precision.md#ranks-that-drift-apart), as they do before "
        "checkpoints and evaluations; 0: never"
    ),
    "run.deterministic": (
        "only [deterministic algorithms](gpus.md#deterministic) of torch, cuDNN and cuBLAS; by default cuDNN's "
        "convolutions are chosen by timing, which is faster, and on CUDA a resumed run is the same to rounding only"
    ),
    "provenance": (
        "settings whose values no source gives, and what they rest on: see [provenance](recipes.md#provenance)"
    ),
}

# Where the schema has None, which is no value that a user could give: what a run takes instead.
DEFAULTS = {
    "name": "that of the file",
    "model.weights": "none: the seed decides",
    "optim.head_learning_rate": "as the others",
    "optim.nesterov": "true for `sgd` with momentum",
    "precision.loss_scale": "dynamic",
    "train.epochs": "one of both must be set",
    "train.steps": "one of both must be set",
    "run.dir": "`runs/<name>-<nnn>`",
    "run.threads": "a share of the cores",
    "run.decode_threads": "as `run.threads`",
}

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
