"""How a run would all-reduce its gradients: measured and chosen on real ranks, with images of noise for its own."""

from megabatch.comm.tune import measure
from megabatch.config.schema import RunConfig
from megabatch.data.sources import infer_shape
from megabatch.planning.choosing import all_questions
from megabatch.planning.tuning import Tuning
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from megabatch.train.noise import noise_like
from megabatch.train.prepare import prepare


def plan_all_reduce(config: RunConfig, info: RankInfo, store: RankStore) -> Tuning:
    """On each rank; every candidate is measured, not only the close ones."""
    noise = noise_like(infer_shape(config.data), config.data.image_size)
    with prepare(config, info, store, data=noise) as ready:
        gradients = ready.training.gradients
        tuning = gradients.plans.tuning
        assert tuning is not None
        return measure(gradients.reducer, tuning, all_questions(tuning))
