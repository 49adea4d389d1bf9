"""What a study is going to do: arms that differ in a few settings, how each finds its learning rate, and criteria."""

from msgspec import Struct

from megabatch.studies.evidence import Claim, Criterion


class ArmDesign(Struct, frozen=True, kw_only=True):
    """One way to train.  Its rate is searched for, from the coarse `grid` on, or follows from another arm's."""

    name: str
    about: str
    overrides: tuple[str, ...]  # section.key=value, which distinguish it
    grid: tuple[float, ...] = ()
    learning_rate_of: str = ""  # the arm whose rate it takes
    learning_rate_times: float = 1.0
    momenta: tuple[float, ...] = ()  # searched within the same budget; the grid is tried with the first
    seeds: int | None = None  # by default the study's

    def __post_init__(self) -> None:
        assert bool(self.grid) != bool(self.learning_rate_of), f"{self.name}: a grid or another's rate"


class Design(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    question: str
    setup: str
    recipe: str
    overrides: tuple[str, ...]  # of all arms
    arms: tuple[ArmDesign, ...]
    baseline: str
    criteria: tuple[Criterion, ...] = ()
    validation: float  # share of the training images that rates are judged by
    trials: int  # of each search
    seeds: int
    final_overrides: tuple[str, ...] = ()  # of the runs that count, beside those of the search
    layer: str = ""  # whose output's variance is followed through the checkpoints
    claims: tuple[Claim, ...] = ()

    @property
    def num_trials(self) -> int:
        """With every search and every seed."""
        return sum(self.trials for arm in self.arms if arm.grid) + sum(self.num_seeds(arm) for arm in self.arms)

    def num_seeds(self, arm: ArmDesign) -> int:
        return self.seeds if arm.seeds is None else arm.seeds

    def stages(self) -> list[tuple[ArmDesign, ...]]:
        """Arms in the order in which they are run: first those that a criterion is about, and whose rates they take.

        Whoever looks in before the end sees what the study set out to show.
        """
        named = {name for criterion in self.criteria for name in (criterion.arm, criterion.baseline)}
        named |= {arm.learning_rate_of for arm in self.arms if arm.name in named}
        judged = tuple(arm for arm in self.arms if arm.name in named)
        others = tuple(arm for arm in self.arms if arm.name not in named)
        return [stage for stage in (judged, others) if stage]
