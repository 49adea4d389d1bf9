"""A training job for any number of ranks: the images per rank, the microbatches and the steps.

A recipe gives the global batch G.  Each of R ranks has G/R images in microbatches of m; G/R must be an integer and a
multiple of m.  A rank with fewer than m images takes them at once.  A model without a recipe gives the images per rank,
and nothing has to divide.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from megabatch.errors import UserError, require_one_of
from megabatch.planning.batch import BatchSettings, StepPlan, plan_steps
from megabatch.planning.sizes import Sizes, plan_stages
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.compute import GRADIENTS, default_precision, find_curve, require_memory
from megabatch.simulate.profile import Profile
from megabatch.simulate.request import ModelSettings
from megabatch.simulate.scenario import RunLength, Scenario
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import Workload, scaled

LARGEST_BATCH = 10**7  # images per rank


class Share(NamedTuple):
    """The part of one rank in a step."""

    num_images: int
    accumulation: int  # microbatches


class Job(Struct, frozen=True, kw_only=True):
    name: str  # of the recipe or the model
    workload: Workload
    precision: str
    all_reduce: AllReduceSettings = AllReduceSettings()
    profile: Profile | None = None  # recorded compute times, instead of the cluster's curve
    global_batch: int | None = None  # None: every rank has batch_per_rank
    batch_per_rank: int = 0
    microbatch: int | None = None  # upper limit; None: all images of the rank
    num_train: int  # images per epoch
    num_test: int  # images per evaluation, counted once per forward pass
    epochs: float | None = None
    num_steps: int | None = None  # overrides epochs
    evaluate_every: int = 1  # epochs; 0: only after the last step
    sizes: Sizes = []  # of training images over the run; the workload has the largest
    test_side: int | None = None  # of test images, if it is another

    @property
    def has_length(self) -> bool:
        return self.epochs is not None or self.num_steps is not None

    def share(self, num_ranks: int) -> Share:
        if self.global_batch is None:
            return share_images(self.batch_per_rank, self.microbatch)
        return share_batch(self.global_batch, self.microbatch or self.global_batch, num_ranks)

    def can_share(self, num_ranks: int) -> bool:
        return self.global_batch is None or divides(self.global_batch, self.microbatch or self.global_batch, num_ranks)

    def scenario(self, cluster: Cluster, num_ranks: int) -> Scenario:
        """Raise UserError if the ranks cannot share the batch, or a microbatch does not fit on the device."""
        require_device(cluster, self.profile)
        num_images, accumulation = self.share(num_ranks)
        require_memory(self.workload, cluster, self.precision, num_images // accumulation)
        return Scenario(
            workload=self.workload,
            cluster=cluster,
            num_ranks=num_ranks,
            batch_per_rank=num_images,
            accumulation=accumulation,
            precision=self.precision,
            all_reduce=self.all_reduce,
            profile=self.profile,
            length=self.length(num_ranks) if self.has_length else None,
        )

    def length(self, num_ranks: int) -> RunLength:
        num_images, accumulation = self.share(num_ranks)
        plan = plan_steps(
            BatchSettings(global_batch=num_images * num_ranks, microbatch=num_images // accumulation),
            num_ranks,
            self.num_train,
            self.epochs or 0.0,
            self.evaluate_every,
            self.num_steps,
        )
        sides = plan_stages(self.sizes, self.workload.image_size, plan.num_steps) if self.sizes else []
        return RunLength(
            num_steps=plan.num_steps,
            num_evaluations=count_evaluations(plan),
            test_images=self.num_test,
            stages=sides,
            test_side=self.test_side,
        )


def job_of_model(
    workload: Workload,
    cluster: Cluster,
    settings: ModelSettings,
    all_reduce: AllReduceSettings,
    batch_per_rank: int | None,
    num_train: int,
    num_test: int,
    profile: Profile | None = None,
) -> Job:
    """Return the job of a model without a recipe.

    The default precision is the cluster's 16-bit one and the default batch that of its first point; with a profile, its
    precision and its largest batch.
    """
    require_device(cluster, profile)
    precision = settings.precision or (profile.precision if profile else default_precision(cluster))
    require_one_of("precision.name", precision, GRADIENTS)
    if settings.image_size is not None:
        workload = scaled(workload, settings.image_size)
    if batch_per_rank is None:
        recorded = max(profile.microbatches) if profile else None
        batch_per_rank = recorded or measured_batch(cluster, precision, workload.model)
    job = Job(
        name=workload.model,
        workload=workload,
        precision=precision,
        all_reduce=all_reduce,
        batch_per_rank=batch_per_rank,
        microbatch=settings.microbatch,
        num_train=num_train,
        num_test=num_test,
        epochs=settings.epochs,
    )
    return with_profile(job, profile) if profile else job


def require_device(cluster: Cluster, profile: Profile | None) -> None:
    """Raise UserError if nothing gives the speed of a device: `megabatch plan` measures only links."""
    if not cluster.device.curves and not profile:
        raise UserError(
            f"--cluster {cluster.name} has no speed of its devices; record a profile (megabatch profile RECIPE "
            "--json FILE) and give it: --profile FILE"
        )


def with_profile(job: Job, profile: Profile) -> Job:
    """Raise UserError if the profile was recorded with other settings."""
    recorded = {
        "model.name": (profile.model, job.workload.model),
        "data.image_size": (profile.image_size, job.workload.image_size),
        "precision.name": (profile.precision, job.precision),
    }
    for key, (found, wanted) in recorded.items():
        if found != wanted:
            raise UserError(
                f"--profile was recorded with {key}={found}, but this job has {key}={wanted}; give {key}={found}, "
                "or record it again: megabatch profile RECIPE --json FILE"
            )
    return replace(job, profile=profile)


def measured_batch(cluster: Cluster, precision: str, model: str) -> int:
    points = find_curve(cluster, precision, model).points
    variant = cluster.device.variant or points[0].variant
    return round(next((point.batch for point in points if point.variant == variant), points[0].batch))


def require_batch(batch_per_rank: int | None) -> None:
    if batch_per_rank is not None and not 1 <= batch_per_rank <= LARGEST_BATCH:
        raise UserError(
            f"--batch-per-rank {batch_per_rank} is not from 1 to {LARGEST_BATCH:,}; "
            f"nearest: --batch-per-rank {1 if batch_per_rank < 1 else LARGEST_BATCH}"
        )


def with_batch_per_rank(job: Job, batch_per_rank: int) -> Job:
    """Return the job with a global batch that grows with the ranks."""
    return replace(job, global_batch=None, batch_per_rank=batch_per_rank)


def share_images(num_images: int, microbatch: int | None) -> Share:
    if microbatch is None or num_images <= microbatch:
        return Share(num_images, 1)
    if num_images % microbatch:
        below = num_images // microbatch * microbatch
        closest = min((below, below + microbatch), key=lambda size: abs(size - num_images))
        raise UserError(
            f"--batch-per-rank {num_images} is not a whole number of microbatches of {microbatch} (batch.micro); "
            f"nearest: --batch-per-rank {closest}"
        )
    return Share(num_images, num_images // microbatch)


def divides(global_batch: int, microbatch: int, num_ranks: int) -> bool:
    num_images, rest = divmod(global_batch, num_ranks)
    return not rest and (num_images <= microbatch or not num_images % microbatch)


def share_batch(global_batch: int, microbatch: int, num_ranks: int) -> Share:
    if divides(global_batch, microbatch, num_ranks):
        num_images = global_batch // num_ranks
        return Share(num_images, max(1, num_images // microbatch))
    below = next(
        count for count in range(min(num_ranks, global_batch), 0, -1) if divides(global_batch, microbatch, count)
    )
    above = next((n for n in range(num_ranks + 1, global_batch + 1) if divides(global_batch, microbatch, n)), None)
    rule = (
        f"is {global_batch / num_ranks:,.2f} images for each of {num_ranks:,} ranks, and must be a whole number"
        if global_batch % num_ranks
        else f"is {global_batch // num_ranks:,} images for each of {num_ranks:,} ranks, which is not a whole number of "
        f"microbatches of {microbatch} (batch.micro)"
    )
    raise UserError(
        f"batch.global={global_batch} {rule}; "
        f"nearest: --ranks {below}{f' or {above}' if above else ''}, or --batch-per-rank B"
    )


def count_evaluations(plan: StepPlan) -> int:
    """Return the number of evaluations: as often as `StepPlan.should_evaluate_after` is true."""
    if not plan.evaluate_every:
        return 1
    span = plan.evaluate_every * plan.num_samples
    before, after = (steps * plan.global_batch // span for steps in (plan.num_steps - 1, plan.num_steps))
    return min(plan.num_steps, after) + (after == before)


def notes(job: Job, ranks: Iterable[int], recipe_batch: int | None, comm_dtype: str | None = None) -> list[str]:
    """Return notes to print below the table.

    Args:
        recipe_batch: the global batch of the recipe, if there is one.
        comm_dtype: the comm dtype given on the command line.
    """
    found = []
    if recipe_batch is not None and job.global_batch is None:
        adapted = (
            "the number of steps is adapted, learning rates are not"
            if job.num_steps is None
            else f"neither the number of steps (train.steps={job.num_steps}) nor learning rates are adapted"
        )
        found.append(
            f"--batch-per-rank {job.batch_per_rank}: the global batch is this times the ranks instead of the recipe's "
            f"{recipe_batch:,}; {adapted}"
        )
    dtype = GRADIENTS[job.precision]
    if comm_dtype not in (None, "same", dtype) and dtype in ("fp16", "bf16"):
        found.append(
            f"--comm-dtype {comm_dtype} has no effect: with precision.name={job.precision} gradients are {dtype}, "
            "and are sent unchanged"
        )
    shares = {num_ranks: job.share(num_ranks).num_images for num_ranks in ranks}
    short = {num_ranks: size for num_ranks, size in shares.items() if size < (job.microbatch or 0)}
    if short:
        sizes = list(dict.fromkeys(short.values()))
        found.append(
            f"at {join(list(short))} ranks, a rank has {join(sizes)} images, fewer than batch.micro={job.microbatch}: "
            f"they are one microbatch, and BatchNorm uses {join(sizes)} images; set batch.micro={join(sizes, ' or ')} "
            "for the run"
        )
    return found


def join(values: Sequence[int], last: str = " and ") -> str:
    shown = [f"{value:,}" for value in values]
    return last.join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
