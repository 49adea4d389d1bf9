"""How long a run is: `train.epochs` or `train.steps`, and a warm-up that ends within it.

Steps decide where they are given; the recipe's epochs beside them only say for how long a run its warm-up was made.
A warm-up that a shorter run has no room for is shortened in that proportion, unless it was given for this very run.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megabatch.config.schema import FIELDS, Settings, flatten

EPOCHS, STEPS, WARMUP = "train.epochs", "train.steps", "schedule.warmup_epochs"


def settle_length(
    settings: Settings, overridden: Sequence[str], recipe_epochs: Any, report: Callable[[str], None]
) -> list[str]:
    """Of epochs and steps the one that was overridden last decides.  Returns the settings that were changed here.

    `recipe_epochs` are those from before the overrides; what is no number is left for msgspec to refuse.
    """
    train, schedule = settings.get("train"), settings.setdefault("schedule", {})
    if not isinstance(train, dict) or not isinstance(schedule, dict):
        return []
    # A whole section that was given later may have neither.
    given = [key for key in overridden if key in (EPOCHS, STEPS) and key.removeprefix("train.") in train]
    if not given:
        return []
    if {*given} == {EPOCHS, STEPS}:
        report(f"{EPOCHS} and {STEPS} are both given; the last counts: {given[-1]}")
    if given[-1] == STEPS:
        train.pop("epochs", None)
        if recipe_epochs is not None and WARMUP not in overridden:
            train["epochs"] = recipe_epochs
        return [EPOCHS] if "epochs" not in train else []
    train.pop("steps", None)
    epochs, warmup = train["epochs"], schedule.get("warmup_epochs", 0.0)
    if WARMUP in overridden or not all(map(is_positive, (epochs, warmup, recipe_epochs))):
        return []
    if not epochs <= warmup < recipe_epochs:
        return []
    schedule["warmup_epochs"] = shorten_warmup(warmup, recipe_epochs, epochs)
    report(
        f"{EPOCHS}={epochs:g} is no longer than the recipe's warm-up of {warmup:g}, which is shortened in proportion: "
        f"{WARMUP}={schedule['warmup_epochs']:.3g} ({warmup:g} of {recipe_epochs:g})"
    )
    return [WARMUP]


def shorten_warmup(warmup_epochs: float, recipe_epochs: float, epochs: float) -> float:
    """The same share of a run of `epochs` as the recipe's warm-up is of its own."""
    return warmup_epochs * epochs / recipe_epochs


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def dotted_keys(key: str, value: Any) -> Iterator[str]:
    """The settings that an override gives: itself, or those of a whole section."""
    if isinstance(value, dict) and key not in FIELDS:
        yield from (name for name, _ in flatten(value, f"{key}."))
    else:
        yield key
