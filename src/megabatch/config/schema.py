"""RunConfig: everything that a recipe can say.  Each section is a frozen Struct beside the code that reads it."""

import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from megabatch.comm.settings import CommSettings
from megabatch.data.settings import DataSettings
from megabatch.errors import LONGEST_QUOTED, UserError, require_one_of
from megabatch.models.catalog import ModelSettings
from megabatch.models.loss import LossSettings
from megabatch.optim.optimizers import OptimSettings
from megabatch.optim.schedules import ScheduleSettings
from megabatch.planning.batch import BatchSettings
from megabatch.precision.policy import PrecisionSettings
from megabatch.ranks.backends import BACKENDS
from megabatch.text import one_line

Settings = dict[str, Any]
MOST_STEPS = 10**12
LONGEST_NAME = 100
NAME = re.compile(rf"\w[\w.-]{{0,{LONGEST_NAME - 1}}}")
StepCount = Annotated[int, Meta(ge=0, le=MOST_STEPS)]
Threads = Annotated[int, Meta(ge=1, le=4096)]
PREEMPT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # what batch systems can be told to send


class TrainSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    epochs: Annotated[float, Meta(gt=0, le=10**6)] | None = None
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] | None = None  # decide, where they are given: see `config.length`
    target_top1: Annotated[float, Meta(gt=0, le=1)] | None = None  # the accuracy whose time is reported
    evaluate_every: Annotated[int, Meta(ge=0, le=10**6)] = 1  # epochs, and after the last; 0: after the last alone
    examples: Annotated[int, Meta(ge=0, le=1000)] = 24  # pictures of the most confident mistakes, which a run keeps

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise UserError("neither train.epochs nor train.steps is set; for example train.epochs=12")

    @property
    def length(self) -> str:
        """As it was given."""
        return f"{self.epochs:g} epochs" if self.steps is None else f"{self.steps:,} steps"


class CheckpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With neither `every_steps` nor `every_minutes`, as often as costs a hundredth of the time."""

    every_steps: StepCount = 0
    every_minutes: Annotated[float, Meta(ge=0, le=10**6)] = 0.0
    keep: Annotated[int, Meta(ge=1, le=10**6)] = 2  # the newest; the best is kept besides


class RunSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dir: Annotated[str, Meta(min_length=1)] | None = None  # the run's folder; by default runs/<recipe>-<nnn>
    device: str = "auto"  # cuda where there is one, else cpu
    threads: Threads | None = None  # of a rank; by default its share of the cores
    decode_threads: Threads | None = None  # beside them, for images; by default as many
    preempt_signal: str = "SIGTERM"  # sent by who will take this host, besides SIGTERM: save, and end
    compare_every: StepCount = 100  # steps after which ranks compare their weights; 0: never
    deterministic: bool = False  # only deterministic algorithms; convolutions are chosen by rule, and not by timing

    def __post_init__(self) -> None:
        require_one_of("run.device", self.device, ["auto", *BACKENDS])
        require_one_of("run.preempt_signal", self.preempt_signal, PREEMPT_SIGNALS)


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    name: str  # of the recipe, by default that of its file: of folders too, and so a plain one
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
    provenance: dict[str, str] = field(default_factory=dict)  # of values that no source gives: what they rest on

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"name={one_line(repr(self.name), LONGEST_QUOTED)}: it begins the names of folders, and so takes 1 to "
                f"{LONGEST_NAME} letters, digits, _, - and ., and begins with one of the first three; for example "
                "name='my-recipe'"
            )
        if self.schedule.decay != "constant" and self.schedule.end > self.optim.learning_rate:
            raise UserError(
                f"schedule.end={self.schedule.end:g} is more than optim.learning_rate={self.optim.learning_rate:g}, "
                "from which the learning rate decays; for example schedule.end=0"
            )
        if self.train.epochs is not None and self.schedule.warmup_epochs >= self.train.epochs:
            raise UserError(
                f"train.epochs={self.train.epochs:g} is no longer than schedule.warmup_epochs="
                f"{self.schedule.warmup_epochs:g}; for example also schedule.warmup_epochs={self.train.epochs / 4:g}"
            )

    def with_run(self, **changes: Any) -> "RunConfig":
        return msgspec.structs.replace(self, run=msgspec.structs.replace(self.run, **changes))

    def to_toml(self) -> str:
        """The resolved recipe; what is None is left out, as TOML has no null."""
        return msgspec.toml.encode(without_none(msgspec.to_builtins(self))).decode()


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(member) for key, member in value.items() if member is not None}
    return value


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


def flatten(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict) and prefix + name not in FIELDS:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
