"""Studies with invented results."""

from collections.abc import Sequence

from megabatch.experiments.evidence import Arm, Claim, Criterion, SearchRun, SeedRun, Study

BASELINE, TRIAL = "SGD at 128", "LARS at 3,072"


def seed_run(seed: int, top1: float | None) -> SeedRun:
    end = 0.1 if top1 is None else top1
    loss: list[tuple[float, float | None]] = [(1.0, 1 - 0.5 * end), (2.0, 1 - 0.9 * end), (3.0, 1 - end)]
    variance: list[tuple[float, float | None]] = [(1.0, 0.1 * seed), (2.0, 1.0 * seed), (3.0, 30.0 * seed)]
    curves = {"training loss": loss, "variance of pool5's output": variance}
    return SeedRun(
        trial=f"seed-{seed}", fingerprint="f", seed=seed, top1=top1, test_loss=0.3, wall_s=60.0, curves=curves
    )


def searched(rate: float, top1: float | None, momentum: float | None = None) -> SearchRun:
    return SearchRun(trial=f"search-{rate}", fingerprint="f", learning_rate=rate, momentum=momentum, top1=top1)


def untrained(name: str, tuned: Sequence[SearchRun] = (), num_seeds: int = 3) -> Arm:
    return Arm(
        name=name,
        about="",
        settings=[],
        learning_rate=None,
        num_trials=len(tuned),
        num_seeds=num_seeds,
        tuned=list(tuned),
    )


def arm(name: str, top1s: Sequence[float | None], rate: float | None = 0.2) -> Arm:
    return Arm(
        name=name,
        about=f"about {name}",
        settings=["batch.global=3072", "optim.name=lars"],
        learning_rate=rate,
        num_trials=4,
        num_seeds=len(top1s),
        tuned=[searched(0.1, 0.91), searched(0.2, 0.93), searched(0.4, 0.5), searched(0.8, None)],
        runs=[seed_run(seed, top1) for seed, top1 in enumerate(top1s, start=1)],
    )


def study(arms: Sequence[Arm], max_gap_points: float = 0.3) -> Study:
    """Return a study whose baseline is the first arm; every other arm has a criterion."""
    first, *others = [arm.name for arm in arms]
    return Study(
        name="large-batch",
        title="Huge batches",
        question="Do huge batches lose accuracy?",
        command="megabatch study large-batch",
        setup="Fashion-MNIST, small_resnet, 3 epochs.",
        baseline=first,
        arms=list(arms),
        criteria=[Criterion(arm=name, baseline=first, max_gap_points=max_gap_points) for name in others],
        took_s=5400.0,
        versions={"torch": "2.13.0"},
        machine="2 cores",
        claims=[Claim(text=f"The paper finds {name} worse.", better=first, worse=name, points=0.3) for name in others],
    )


def pair(baseline: Sequence[float | None], trial: Sequence[float | None], max_gap_points: float = 0.3) -> Study:
    return study([arm(BASELINE, baseline), arm(TRIAL, trial)], max_gap_points)
