"""The reference of all settings, for `megabatch settings` and docs/settings.md."""

import re
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from megabatch.config.schema import FIELDS, PREEMPT_SIGNALS
from megabatch.models.catalog import MODELS
from megabatch.optim.lars import VARIANTS
from megabatch.optim.muon import SCALES
from megabatch.optim.optimizers import OPTIMIZERS
from megabatch.optim.schedules import DECAYS
from megabatch.planning.algorithms import ALGORITHMS, ON_REQUEST
from megabatch.precision.policy import PRECISIONS
from megabatch.ranks.backends import BACKENDS

# The meaning of each setting, for `megabatch settings` and docs/settings.md. Each text is one line of Markdown, with
# links relative to docs/. Types, bounds, choices and defaults come from the schema.
MEANINGS = {
    "name": (
        "name of the recipe and prefix of its runs, `runs/<name>-<nnn>`; up to 100 alphanumeric characters, `_`, `-` "
        "and `.`, not starting with `-` or `.`"
    ),
    "about": "one line for `megabatch recipes`",
    "seed": "seed of the initial weights, the order of samples, crops, flips and dropout",
    "model.name": (
        "a built-in model, or your own as `package.module:factory`; `alexnet` and `alexnet_bn` need images of at least "
        "39 pixels, `small_alexnet_bn` has an eighth of their channels, for 28 pixels"
    ),
    "model.options": "keyword arguments of the factory, such as `model.options.width=32`",
    "model.weights": (
        "initial weights: a `.safetensors`, `.pth` or `.pt` file, or the folder of another run; see "
        "[weights](use-weights.md)"
    ),
    "model.freeze": (
        'modules that are not trained and run in evaluation mode, such as `model.freeze=["conv1", "bn1", "layer1"]`'
    ),
    "model.channels_last": (
        "memory format of images and kernels; `auto` is true for built-in models and false for "
        "[your own](recipes.md#your-own-model)"
    ),
    "model.compile": "train with `torch.compile`: see [GPUs](gpus.md#compile)",
    "model.cuda_graphs": "run microbatches that are not all-reduced as CUDA graphs: see [GPUs](gpus.md#cuda-graphs)",
    "data.source": (
        "a folder of class folders, a [`.csv` file](data.md#labels-in-a-csv-file), a `.tar`, a folder of tars, a pack "
        "(see [images](data.md)); an `.npz` file, a folder of four IDX files; CIFAR's binary version, as a folder or "
        "`.tar.gz`; `fashion-mnist-10k`, `fashion-mnist`, `synthetic`, or `imagenet`, the folder of that name, "
        "which may be missing for a plan"
    ),
    "data.multi_label": ("an image may have [several labels](data.md#several-labels-per-image); needs `loss.name=bce`"),
    "data.also": "more folders, `.csv` files and tars, merged by class name",
    "data.image_size": "side of a training image in pixels, to which all are resized; with `data.sizes`, the largest",
    "data.sizes": (
        "[side of training images over the run](data.md#sizes-over-the-run): a list of [share of the run, side], such "
        "as `[[0, 128], [0.4, 160], [0.75, 192]]`, or a ramp, such as `{ from = 88, to = 176, start = 0.4, end = 0.8, "
        "multiple = 4 }`; by default always `data.image_size`"
    ),
    "data.test_image_size": "side of an image in evaluation, prediction and export",
    "data.test_views": (
        "views of a test image whose scores are averaged: `one`, the image itself; `mirror`, it and its mirror image; "
        "`mirror-shift`, both of them, with half of the weight, and both shifted by a pixel up and left and down and "
        "right. Evaluation then takes 2 or 6 times as long"
    ),
    "data.crop_area": (
        "smallest share of the image's area that a random crop takes; by default images are not cropped at random"
    ),
    "data.crop_ratio": "largest aspect ratio (width / height) of a random crop; the smallest is its inverse",
    "data.center_crop": (
        "side of the central square, as a share of the shorter side, used if images are not cropped at random; `auto` "
        "is 0.875, or 1 for images that are already [small](data.md#decoding)"
    ),
    "data.crop_padding": "pixels around an image before it is cropped back at random; less than `data.image_size`",
    "data.padding_mode": "the pixels of `data.crop_padding`: zeros, or the image mirrored at its edges",
    "data.flip": (
        "mirror images: `true` a random half in each epoch, `alternating` a random half in every second epoch and the "
        "other half in the others"
    ),
    "data.augment.policy": (
        "operations on colours and geometry: see [augmentation](augmentation.md); `rand_augment` is torchvision's form"
    ),
    "data.augment.operations": "operations per image of `rand_augment` and `rand_augment_timm`",
    "data.augment.magnitude": "strength of `rand_augment`, of 30, or of `rand_augment_timm`, of at most 10",
    "data.augment.magnitude_std": "`rand_augment_timm`: deviation of the strength (`mstd`)",
    "data.augment.increasing": "`rand_augment_timm`: a larger strength always changes the image more (`inc`)",
    "data.augment.probability": "`rand_augment_timm`: probability that each operation is applied (`p`)",
    "data.augment.brightness": "colour jitter: brightness is multiplied by 1 minus this to 1 plus this",
    "data.augment.contrast": "the same for the contrast",
    "data.augment.saturation": "the same for the saturation",
    "data.augment.hue": "colour jitter: the hue is turned by up to this share of a circle, in both directions",
    "data.augment.erase": "probability that a box of 2 to 33 % of an image is erased",
    "data.augment.erase_with": "erase with the mean pixel of the training images, or with noise",
    "data.augment.repeats": (
        "times that a sample is used in an epoch, augmented differently each time; the epoch keeps its length"
    ),
    "data.augment.mixup": "alpha of MixUp: each microbatch is mixed with itself; 0 is off",
    "data.augment.cutmix": "alpha of CutMix; 0 is off; if both are on, each microbatch takes one of them at random",
    "data.exif_orientation": (
        "turn photos by their [EXIF orientation](data.md#decoding); torchvision's ImageFolder and timm ignore it"
    ),
    "data.sampling": (
        "images of an epoch: `all`, or `balanced`, [the same number of every class](data.md#classes-of-different-sizes)"
    ),
    "data.train_per_class": (
        "number of training images per class, taken before validation images are held out; by default all"
    ),
    "data.validation": (
        "share of the training images of every class that is held out for testing; 0 tests on the source's test "
        "images; `auto` uses those if they exist and otherwise holds out a tenth"
    ),
    "data.validation_seed": "seed that selects held-out images and the images of `data.train_per_class`",
    "data.decoder": (
        "JPEG decoder: `cpu`, or a custom [decoder for GPUs](data.md#decoding-on-a-gpu); none is built in"
    ),
    "data.on_error": "[what to do](data.md#images-that-cannot-be-read) with images that cannot be read",
    "data.skip_limit": "largest share of an epoch's images that may be skipped",
    "data.max_pixels": "larger images are refused before they are decoded",
    "data.max_file_mb": "larger files or tar members are not read",
    "data.image_timeout_s": (
        "seconds to read and decode one image, after which it [cannot be read](data.md#images-that-cannot-be-read)"
    ),
    "data.synthetic.train": "training images of the `synthetic` source",
    "data.synthetic.test": "test images of the `synthetic` source",
    "data.synthetic.classes": "classes of the `synthetic` source",
    "data.synthetic.channels": "channels of the `synthetic` source",
    "batch.global": "samples per optimizer step, over all ranks",
    "batch.micro": (
        "samples per forward and backward pass, and per BatchNorm; `batch.global` must be a multiple of it"
    ),
    "optim.name": (
        "the [optimizer](optimizers.md); a class such as `torch.optim:AdamW`; or your own `package.module:function`, "
        "called with parameter groups and these settings like the optimizer of [`fit`](python.md)"
    ),
    "optim.learning_rate": "peak learning rate",
    "optim.head_learning_rate": "peak learning rate of the last layer; it follows the same schedule",
    "optim.layer_decay": (
        "factor of the learning rate from each layer to the one below it, for [fine-tuning](optimizers.md#layer-decay)"
    ),
    "optim.groups": (
        "parameters with their own settings: a list of [tables](optimizers.md#groups) with `parameters`, a list of "
        "names in which `*` stands for any text, and any of `optimizer`, `learning_rate`, `momentum`, `weight_decay` "
        "and `until`, the share of the run after which they are not trained; the last table that names one applies"
    ),
    "optim.momentum": "momentum of `sgd`, `lars` and `muon`",
    "optim.nesterov": "Nesterov momentum, for `sgd` and `muon`",
    "optim.betas": "decays of the averages of gradients and their squares, for `adamw` and `lamb`",
    "optim.weight_decay": (
        "weight decay of weights; biases, normalisation layers and other vectors have none; `adamw` and `muon` "
        "multiply it by the learning rate"
    ),
    "optim.decay_all": (
        "decay biases and normalisation layers too, which cost AlexNet 1.3 points at 64K (Jia et al. 2018)"
    ),
    "optim.decoupled_decay": (
        "of `sgd`: each step multiplies the decayed weights by 1 - `optim.weight_decay` x the learning rate's share of "
        "its peak, instead of adding to the gradient, as in Composer's DecoupledSGDW"
    ),
    "optim.clip_norm": "largest norm of the whole gradient; 0 does not clip",
    "optim.variant": "variant of `lars`: one of [these](optimizers.md#lars); others ignore this and the next",
    "optim.trust_coefficient": (
        "trust coefficient of `lars`: the change of a weight at a learning rate of 1, as a share of its norm"
    ),
    "optim.eps": "added to the denominator: the gradient norm in `lars`, the root in `adamw` and `lamb`",
    "optim.muon.scale": "factor of an update of `muon` by the shape of its matrix, one of [these](optimizers.md#muon)",
    "optim.muon.rounds": "rounds of the Newton-Schulz iteration of `muon`",
    "optim.muon.fixed_norm": "`muon` scales every matrix to the norm sqrt(rows) before its update",
    "optim.muon.others": (
        "with `muon`, the optimizer of biases, normalisation layers, the last layer and all else that is not a matrix"
    ),
    "optim.muon.others_learning_rate": "their peak learning rate",
    "optim.options": "arguments of the class that `optim.name` names, such as `{ betas = [0.9, 0.95], fused = true }`",
    "schedule.warmup_epochs": "epochs of linear warm-up, updated every step",
    "schedule.decay": "decay of the learning rate after the warm-up",
    "schedule.power": "exponent of `poly`",
    "schedule.end": "final learning rate of the decay, at most `optim.learning_rate`",
    "loss.name": (
        "`cross_entropy`, or `bce`: binary cross-entropies summed over the classes, with which "
        "`model.options.prior_bias=true` lets a ResNet start well; `test_loss` is always a cross-entropy"
    ),
    "loss.label_smoothing": "label smoothing: the share of the target that is spread evenly over all classes",
    "loss.target_threshold": (
        "`bce`: targets above this are 1 and others 0, including those of mixed images (timm's `--bce-target-thresh`)"
    ),
    "loss.class_weights": (
        "[weights of the classes](data.md#classes-of-different-sizes): `auto`, or a table such as "
        "`loss.class_weights={ cat = 3, dog = 0.5 }`, in which all other classes have 1"
    ),
    "comm.algorithm": (
        "all-reduce of gradients; `auto` chooses the best for each bucket; `ring` is the backend's, which rounds to 16 "
        "bits at every hop; see [communication](communication.md)"
    ),
    "comm.dtype": "dtype of gradients between nodes: `same` does not round, `fp16` enables the loss scale",
    "comm.bucket_mb": (
        "largest size of a gradient bucket in MiB; `auto` is 25 on one node, and between nodes the size that finishes "
        "communication first"
    ),
    "comm.timeout_s": (
        "seconds after which a stuck rank is reported and the run ends or is [restarted](reliability.md); before the "
        "first step is done, the limit is 600 s or three times the longest phase so far"
    ),
    "comm.timeline": ("write a [timeline](clusters.md#timeline) of the newest 50 steps of every rank"),
    "precision.name": "number format of the computation: see [precision](precision.md)",
    "precision.loss_scale": "fixed loss scale; by default it is dynamic, and only used if gradients pass through fp16",
    "train.epochs": (
        "epochs, may be a fraction; steps = floor(epochs x samples / batch.global). If an override makes the run too "
        "short for the recipe's warm-up, the warm-up is shortened [in proportion](recipes.md#shorter-runs)"
    ),
    "train.steps": "number of steps, [instead of](recipes.md#shorter-runs) `train.epochs`",
    "train.target_top1": "top-1 for which `summary.json` reports the time",
    "train.evaluate_every": (
        "epochs between evaluations; 0 evaluates only after the last step, which is always evaluated"
    ),
    "train.ema_half_life_epochs": (
        "half-life of the [moving average of the weights](recipes.md#averaged-weights), which is then evaluated and "
        "stored instead of the weights; 0 keeps no average"
    ),
    "train.ema_every_steps": "steps between updates of the average",
    "train.patience": (
        "end the run after this many evaluations in a row without a better top-1 (with several labels per image, mAP); "
        "0 never does"
    ),
    "train.stop_at_target": "end the run at the first evaluation that reaches `train.target_top1`",
    "train.examples": (
        "number of most confident mistakes of the newest evaluation to keep (`mistakes.json`) for the "
        "[report](report.md); 0 keeps none"
    ),
    "train.noise_every": (
        "steps between measurements of the [gradient noise scale](batch-size.md#the-gradient-noise-scale), which "
        "predicts the cost of larger batches; 0 measures none"
    ),
    "checkpoint.every_steps": "steps between checkpoints",
    "checkpoint.every_minutes": (
        "minutes between checkpoints; if neither is set, the interval is chosen so that writing takes 1 % of the time"
    ),
    "checkpoint.keep": "number of newest checkpoints to keep",
    "checkpoint.keep_best": (
        "number of checkpoints with the best top-1 or mAP to keep too; a slow disk may miss one that is not the best"
    ),
    "run.dir": "folder of the run",
    "run.device": "`auto` is `cuda` if available, else `cpu`",
    "run.threads": "threads per rank",
    "run.decode_threads": "threads per rank that decode images",
    "run.decode_in": "`threads` of the rank, or a separate `process` per rank; `auto` uses a process on accelerators",
    "run.preempt_signal": (
        "signal that [a batch system sends](reliability.md) before it preempts the node, in addition to SIGTERM; the "
        "run saves and exits with 128 + its number"
    ),
    "run.compare_every": (
        "steps between [comparisons of the ranks' weights](precision.md#ranks-that-drift-apart), which also run before "
        "checkpoints and evaluations; 0: only then"
    ),
    "run.mllog": (
        "write [MLPerf's log](recipes.md#what-a-run-leaves), `mllog.txt`; it ends when `train.target_top1` is reached; "
        "a resumed run does not continue it"
    ),
    "run.deterministic": (
        "use only [deterministic algorithms](gpus.md#deterministic-runs) of torch, cuDNN and cuBLAS; by default cuDNN "
        "selects convolutions by timing, which is faster, and on CUDA a resumed run is the same only up to rounding"
    ),
    "provenance": ("the source of a value, or the reason for it: see [provenance](recipes.md#provenance)"),
}

# Defaults of settings with a schema default of None, which TOML cannot express.
DEFAULTS = {
    "name": "name of the file",
    "model.weights": "none: random, from the seed",
    "optim.head_learning_rate": "`optim.learning_rate`",
    "data.test_image_size": "`data.image_size`",
    "optim.nesterov": "true for `sgd` and `muon` with momentum",
    "optim.eps": "1e-8 for `adamw`, 1e-6 for `lamb`, else 0",
    "optim.muon.others_learning_rate": "`optim.learning_rate`",
    "precision.loss_scale": "dynamic",
    "loss.class_weights": "none",
    "train.epochs": "set this or `train.steps`",
    "train.steps": "set this or `train.epochs`",
    "run.dir": "`runs/<name>-<nnn>`",
    "run.threads": "a share of the cores",
    "run.decode_threads": "`run.threads`; with an accelerator 2 less",
}

# Strings that the Structs accept (`require_one_of`).
CHOICES = {
    "model.name": [*MODELS, "package.module:factory"],
    "optim.name": [*OPTIMIZERS, "torch.optim:Class", "package.module:function"],
    "optim.muon.scale": SCALES,
    "optim.muon.others": [name for name in OPTIMIZERS if name != "muon"],
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

Set them in a TOML file, or on the command line as `section.key=value`: see [recipes](recipes.md). `megabatch settings
optim` prints a part of this page, and `megabatch show RECIPE --toml` prints the values of a recipe.

`[` and `]` are bounds inside a range, `(` and `)` are bounds outside it. This page is generated by `megabatch settings
--markdown > docs/settings.md`; a test checks that it is current.
"""


class Setting(Struct, frozen=True):
    """A row of the reference. Its texts are Markdown."""

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
    """Return type and range, such as: number in (0, 1e6]."""
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
        case msgspec.inspect.ListType(item_type=msgspec.inspect.TupleType()):
            yield "list of lists"
        case msgspec.inspect.ListType(item_type=msgspec.inspect.StructType()):
            yield "list of tables"
        case msgspec.inspect.TupleType(item_types=items):
            yield f"list of {len(items)} numbers"
        case msgspec.inspect.ListType():
            yield "list of text"
        case msgspec.inspect.DictType() | msgspec.inspect.StructType():
            yield "table"


def bounds(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    """Return the range of a number; a test ensures that every number has both bounds."""
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
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{field.default:.4g}`" if isinstance(field.default, float) else f"`{field.default}`"


def page() -> str:
    """Return the text of docs/settings.md."""
    sections: dict[str, list[Setting]] = {}
    for setting in all_settings():
        sections.setdefault(setting.section, []).append(setting)
    lines = [HEADER]
    for section, settings in sections.items():
        title = f"`{section}`" if section else "Recipe"
        lines += [f"## {title}", "| setting | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{each.name}` | {each.takes} | {each.default} | {each.meaning} |" for each in settings]
        lines.append("")
    return "\n".join(lines)


def plain(markdown: str) -> str:
    """Return Markdown without links and backticks, for a terminal."""
    return LINK.sub(r"\1", markdown).replace("`", "")
