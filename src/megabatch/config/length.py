"""The length of a run, `train.epochs` or `train.steps`, and a warm-up that fits into it.

If steps are set, they decide; the recipe's epochs then only record the length for which its warm-up was chosen. A
warm-up that does not fit into a shorter run is shortened in proportion, unless the user set it for this run.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megabatch.config.schema import FIELDS, Settings, flatten

EPOCHS, STEPS, WARMUP = "train.epochs", "train.steps", "schedule.warmup_epochs"


def settle_length(
    settings: Settings, overridden: Sequence[str], recipe_epochs: Any, report: Callable[[str], None]
) -> list[str]:
    """Let the last override of epochs and steps decide, and shorten the warm-up if needed.

    Args:
        settings: changed in place. Values of a wrong type are left for msgspec to refuse.
        overridden: dotted names of the overrides, in order.
        recipe_epochs: epochs before the overrides.
        report: called with one line for each change that the user may not expect.

    Returns:
        The names of the settings that were changed.
    """
    train, schedule = settings.get("train"), settings.setdefault("schedule", {})
    if not isinstance(train, dict) or not isinstance(schedule, dict):
        return []
    # A later override of the whole section may have removed both.
    given = [key for key in overridden if key in (EPOCHS, STEPS) and key.removeprefix("train.") in train]
    if not given:
        return []
    if {*given} == {EPOCHS, STEPS}:
        report(f"{EPOCHS} and {STEPS} are both set; the last one is used: {given[-1]}")
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
        f"{EPOCHS}={epochs:g} is not longer than the recipe's warm-up of {warmup:g}, which is shortened in proportion: "
        f"{WARMUP}={schedule['warmup_epochs']:.3g} ({warmup:g} of {recipe_epochs:g})"
    )
    return [WARMUP]


def shorten_warmup(warmup_epochs: float, recipe_epochs: float, epochs: float) -> float:
    """Return a warm-up that is the same share of `epochs` as the recipe's warm-up is of its epochs."""
    return warmup_epochs * epochs / recipe_epochs


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def dotted_keys(key: str, value: Any) -> Iterator[str]:
    """Yield the settings that an override sets: one, or all those of a section."""
    if isinstance(value, dict) and key not in FIELDS:
        yield from (name for name, _ in flatten(value, f"{key}."))
    else:
        yield key
