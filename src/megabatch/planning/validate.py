"""Whether a stored choice can be one: what `choosing` makes always can, but a file may hold anything.

A `Tuning` of the right types may still have no candidates, choose one that is not there, send gradients along links
that were not measured, or take 1e300 seconds.  Whether it was made for some ranks and gradients is another question
(`choosing.is_made_for`).
"""

import math
from collections.abc import Iterator
from typing import get_args

from megabatch.io.reading import Undecodable, decode_json
from megabatch.planning.algorithms import ALGORITHMS, ON_REQUEST
from megabatch.planning.plan import CommDtype, Plan, axes_of
from megabatch.planning.topology import ClusterShape
from megabatch.planning.tuning import Bucket, PricedPlan, Tuning

MAX_BYTES = 32 << 20  # of such a file: that of 16,384 ranks and 300 gradients has half a MB
LEAST_SECONDS, MAX_SECONDS = 1e-15, 1e6  # the least: of what was measured
MAX_ELEMENTS = 2**48
MAX_CAP_MB = 2.0**32


def decode_tuning(content: bytes) -> Tuning:
    """`Undecodable` if it is none."""
    return require_sound(decode_json(content, Tuning))


def require_sound(tuning: Tuning) -> Tuning:
    problem = next(problems(tuning), None)
    if problem:
        raise Undecodable(problem)
    return tuning


def problems(tuning: Tuning) -> Iterator[str]:
    """What cannot be in it."""
    if not tuning.buckets:
        yield "it has no buckets"
    if not tuning.caps_mb or not all(0 <= cap_mb <= MAX_CAP_MB for cap_mb in tuning.caps_mb):
        yield f"caps_mb={tuning.caps_mb}, expected at least one, and 0 to {MAX_CAP_MB:g} each"
    for axis, link in tuning.links.items():
        if not all(map(is_time, (link.alpha_s, link.beta_s_per_byte, link.gamma_s_per_byte))):
            yield f"the link {axis} takes no time that a link can take"
    if not is_time(tuning.backward_s):
        yield f"backward_s={tuning.backward_s:g}, expected seconds"
    known = known_plans(tuning.topology.shape)
    names = [name for bucket in tuning.buckets for name in bucket.gradients]
    if len(set(names)) < len(names):
        yield "a gradient is in it twice"
    for index, bucket in enumerate(tuning.buckets):
        yield from (f"bucket {index}: {problem}" for problem in bucket_problems(bucket, tuning, known))


def bucket_problems(bucket: Bucket, tuning: Tuning, known: set[Plan]) -> Iterator[str]:
    candidates = bucket.candidates
    if not bucket.gradients:
        yield "it has no gradients"
    if not 0 <= bucket.num_elements <= MAX_ELEMENTS:
        yield f"num_elements={bucket.num_elements}, expected 0 to {MAX_ELEMENTS}"
    if not is_time(bucket.ready_s):
        yield f"ready_s={bucket.ready_s:g}, expected seconds"
    if not 0 <= bucket.chosen < len(candidates):
        yield f"chosen={bucket.chosen}, of {len(candidates)} candidates"
    plans = [candidate.plan for candidate in candidates]
    if not known.issuperset(plans):
        yield f"{next(plan.name for plan in plans if plan not in known)!r} is no all-reduce of these ranks"
    elif not axes_of(plans) <= tuning.links.keys():
        yield "a candidate goes along a link of which nothing is known"
    if plans != [candidate.plan for candidate in tuning.buckets[0].candidates]:
        yield "it has other candidates than the first"
    if not all(map(is_priced, candidates)):
        yield "a candidate takes no time that an all-reduce can take"


def is_priced(candidate: PricedPlan) -> bool:
    measured_s = candidate.measured_s
    if not all(map(is_time, candidate.costs[:3])):
        return False
    return measured_s is None or (is_time(measured_s) and candidate.predicted_s > LEAST_SECONDS)


def is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS


def known_plans(shape: ClusterShape) -> set[Plan]:
    """Of every algorithm, in every dtype."""
    made = (make(shape, dtype) for make in (ALGORITHMS | ON_REQUEST).values() for dtype in get_args(CommDtype))
    return {plan for plan in made if plan}
