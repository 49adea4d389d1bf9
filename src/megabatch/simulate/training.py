"""From a step to the end of training: evaluations, checkpoints, interruptions and money.

Legend: T hours of steps and evaluations, M hours between interruptions of the whole job, C hours that a checkpoint
holds it up, R hours for a restart.  Checkpoints every tau = sqrt(2 C M) cost least (Young 1974, Daly 2006): the job
takes T + C floor(T/tau) + T/M (tau/2 + R), for checkpoints, steps that are lost with an interruption, and restarts.
One that is shorter than tau writes none, and loses half of itself.
"""

import math

from msgspec import Struct

from megabatch.simulate.cluster import Cluster


class RunLength(Struct, frozen=True, kw_only=True):
    """What a run goes through."""

    num_steps: int
    num_evaluations: int = 0
    test_images: int = 0


class Training(Struct, frozen=True, kw_only=True):
    steps_s: float
    evaluation_s: float
    faults_s: float  # checkpoints, repeated steps, restarts: as expected
    num_interruptions: float
    checkpoint_minutes: float | None  # between two
    usd: float | None

    @property
    def total_s(self) -> float:
        return self.steps_s + self.evaluation_s + self.faults_s


def train_for(length: RunLength, step_s: float, evaluation_s: float, num_ranks: int, cluster: Cluster) -> Training:
    steps_s = length.num_steps * step_s
    working_s = steps_s + length.num_evaluations * evaluation_s
    faults_s, num_interruptions, interval_s = 0.0, 0.0, math.inf
    faults = cluster.faults
    rate = faults.interruptions_per_rank_hour * num_ranks / 3600  # of the job, a second
    if rate:
        interval_s = math.sqrt(2 * faults.checkpoint_s / rate)
        lost_s = min(interval_s, working_s) / 2
        writing_s = faults.checkpoint_s * math.floor(working_s / interval_s) if interval_s else 0.0
        faults_s = writing_s + working_s * rate * (lost_s + 60 * faults.restart_minutes)
        num_interruptions = working_s * rate
    hours = (working_s + faults_s) / 3600
    price = cluster.price.usd_per_rank_hour
    return Training(
        steps_s=steps_s,
        evaluation_s=length.num_evaluations * evaluation_s,
        faults_s=faults_s,
        num_interruptions=num_interruptions,
        checkpoint_minutes=interval_s / 60 if 0 < interval_s <= working_s else None,
        usd=price * num_ranks * hours if price else None,
    )
