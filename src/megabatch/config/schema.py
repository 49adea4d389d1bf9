"""RunConfig, the schema of a recipe. Each section is a frozen Struct that is defined beside the code that reads it."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from megabatch.comm.settings import CommSettings
from megabatch.data.pipeline.device_decoder import CPU_DECODER, DECODERS
from megabatch.data.settings import DataSettings
from megabatch.errors import LONGEST_QUOTED, UserError, require_one_of
from megabatch.models.catalog import ModelSettings
from megabatch.models.loss import LossSettings
from megabatch.optim.optimizers import OptimSettings
from megabatch.optim.schedules import ScheduleSettings
from megabatch.planning.batch import BatchSettings
from megabatch.planning.sizes import sides_of
from megabatch.precision.policy import PrecisionSettings
from megabatch.ranks.backends import BACKENDS
from megabatch.text import one_line

Settings = dict[str, Any]
MOST_STEPS = 10**12
LONGEST_NAME = 100
MOST_COMPILED = 8  # torch then runs a function eagerly: torch._dynamo.config.recompile_limit
NAME = re.compile(rf"\w[\w.-]{{0,{LONGEST_NAME - 1}}}")
StepCount = Annotated[int, Meta(ge=0, le=MOST_STEPS)]
Threads = Annotated[int, Meta(ge=1, le=4096)]
PREEMPT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # signals that batch systems can send


class TrainSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    epochs: Annotated[float, Meta(gt=0, le=10**6)] | None = None
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] | None = None  # instead of epochs: see `config.length`
    target_top1: Annotated[float, Meta(gt=0, le=1)] | None = None  # report the time to this accuracy
    evaluate_every: Annotated[int, Meta(ge=0, le=10**6)] = 1  # epochs; the last step is always evaluated, 0: only that
    ema_half_life_epochs: Annotated[float, Meta(ge=0, le=10**6)] = 0.0  # of the weights' moving average; 0: none
    ema_every_steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 1  # between updates of the average
    patience: Annotated[int, Meta(ge=0, le=10**6)] = 0  # evaluations without a better score that end the run; 0: none
    stop_at_target: bool = False  # end the run at the first evaluation that reaches target_top1
    examples: Annotated[int, Meta(ge=0, le=1000)] = 24  # most confident mistakes that a run keeps
    noise_every: Annotated[int, Meta(ge=0, le=10**6)] = 20  # steps between measurements of the gradient noise scale

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise UserError("neither train.epochs nor train.steps is set; for example train.epochs=12")
        if self.stop_at_target and self.target_top1 is None:
            raise UserError("train.stop_at_target=true: there is no target; for example train.target_top1=0.9")
        if (self.patience or self.stop_at_target) and not self.evaluate_every:
            ending = f"patience={self.patience}" if self.patience else "stop_at_target=true"
            raise UserError(
                f"train.{ending} with train.evaluate_every=0: only the last step is evaluated; "
                "for example train.evaluate_every=1"
            )

    @property
    def length(self) -> str:
        """Return the length in the unit that the user gave."""
        return f"{self.epochs:g} epochs" if self.steps is None else f"{self.steps:,} steps"


class CheckpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Interval of checkpoints. If neither is set, writing takes 1 % of the time."""

    every_steps: StepCount = 0
    every_minutes: Annotated[float, Meta(ge=0, le=10**6)] = 0.0
    keep: Annotated[int, Meta(ge=1, le=10**6)] = 2  # the newest
    keep_best: Annotated[int, Meta(ge=1, le=10**6)] = 1  # kept as well: those with the best score


class RunSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dir: Annotated[str, Meta(min_length=1)] | None = None  # by default runs/<recipe>-<nnn>
    device: str = "auto"  # cuda if available, else cpu
    threads: Threads | None = None  # per rank; by default its share of the cores
    decode_threads: Threads | None = None  # in addition, for images; by default as many
    decode_in: Literal["auto", "threads", "process"] = "auto"  # auto: in a process if the device is an accelerator
    preempt_signal: str = "SIGTERM"  # in addition to SIGTERM: save and exit
    compare_every: StepCount = 100  # steps between comparisons of the ranks' weights
    mllog: bool = False  # write MLPerf's log
    deterministic: bool = False  # convolutions are selected by rule, not by timing

    def __post_init__(self) -> None:
        require_one_of("run.device", self.device, ["auto", *BACKENDS])
        require_one_of("run.preempt_signal", self.preempt_signal, PREEMPT_SIGNALS)


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    """The settings of a run: a recipe with all defaults and overrides applied.

    Attributes:
        name: Name of the recipe, by default that of its file. It starts the names of run folders.
        about: A description of the recipe.
        seed: Seed of all random numbers.
        model: The network.
        data: Images, crops and flips.
        batch: Global batch and microbatch.
        optim: The optimizer and its learning rate.
        schedule: Warm-up and decay of the learning rate.
        loss: The loss.
        comm: The all-reduce of gradients.
        precision: Number formats.
        train: Length of the run and evaluations.
        checkpoint: How often checkpoints are written and how many are kept.
        run: Folder, device, threads and signals.
        provenance: The sources of values, or the reasons for them.

    Raises:
        UserError: A setting is invalid, or two settings contradict each other.

    Examples:
        >>> config = megabatch.load_config("fashion", ["batch.global=512"])
        >>> config.batch.global_batch
        512
    """

    name: str
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
    provenance: dict[str, str] = field(default_factory=dict)  # sources of values, or reasons for them

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"name={one_line(repr(self.name), LONGEST_QUOTED)}: expected 1 to {LONGEST_NAME} alphanumeric "
                "characters, _, - or ., not starting with - or .; for example name='my-recipe'"
            )
        require_one_of("data.decoder", self.data.decoder, [CPU_DECODER, *DECODERS])
        if self.data.multi_label and self.loss.name != "bce":
            raise UserError(
                f"data.multi_label=true with loss.name={self.loss.name}: only bce has a target for each class; set "
                "loss.name=bce"
            )
        num_sides = len(sides_of(self.data.sizes))
        if self.model.compile and num_sides > MOST_COMPILED:
            raise UserError(
                f"model.compile=true: data.sizes has {num_sides} sides, and torch compiles a network for at most "
                f"{MOST_COMPILED}; use fewer sides, a larger multiple of the ramp, or omit model.compile"
            )
        if self.model.cuda_graphs and num_sides > 1:
            raise UserError(
                f"model.cuda_graphs=true: data.sizes has {num_sides} sides, and a CUDA graph has images of one size; "
                "omit one of them"
            )
        if self.schedule.decay != "constant" and self.schedule.end > self.optim.learning_rate:
            raise UserError(
                f"schedule.end={self.schedule.end:g} is above optim.learning_rate={self.optim.learning_rate:g}, "
                "but the learning rate decays from there; for example schedule.end=0"
            )
        if self.train.epochs is not None and self.schedule.warmup_epochs >= self.train.epochs:
            raise UserError(
                f"train.epochs={self.train.epochs:g} is not longer than schedule.warmup_epochs="
                f"{self.schedule.warmup_epochs:g}; for example schedule.warmup_epochs={self.train.epochs / 4:g}"
            )

    def with_run(self, **changes: Any) -> "RunConfig":
        return msgspec.structs.replace(self, run=msgspec.structs.replace(self.run, **changes))

    def to_toml(self) -> str:
        """Return the resolved recipe without None values, because TOML has no null."""
        return msgspec.toml.encode(without_none(msgspec.to_builtins(self))).decode()


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return list(map(without_none, value))
    return value


def fields_of(struct: type[Struct], prefix: str = "") -> Iterator[tuple[str, msgspec.inspect.Field]]:
    """Yield every setting with its dotted name."""
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
    """Return the type of a setting without `| None`, or None if the setting does not exist."""
    kind = FIELDS[key].type if key in FIELDS else None
    if isinstance(kind, msgspec.inspect.UnionType):
        return next(member for member in kind.types if not isinstance(member, msgspec.inspect.NoneType))
    return kind


def flatten(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict) and prefix + name not in FIELDS:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
