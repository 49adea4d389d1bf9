"""How a run would all-reduce its gradients: measured and chosen on real ranks, with images of noise for its own."""

from megabatch.comm.tune import measure
from megabatch.config.schema import RunConfig
from megabatch.data.settings import DataSettings, SyntheticSettings
from megabatch.data.sources import infer_shape, load_data_set
from megabatch.planning.choosing import all_questions
from megabatch.planning.tuning import Tuning
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from megabatch.train.prepare import prepare


def plan_all_reduce(config: RunConfig, info: RankInfo, store: RankStore) -> Tuning:
    """On each rank; every candidate is measured, not only the close ones."""
    shape = infer_shape(config.data)
    noise = SyntheticSettings(train=shape.num_train, test=1, classes=shape.num_classes, channels=shape.num_channels)
    images = DataSettings(source="synthetic", image_size=config.data.image_size, synthetic=noise)
    with prepare(config, info, store, data=load_data_set(images)) as ready:
        gradients = ready.training.gradients
        tuning = gradients.plans.tuning
        assert tuning is not None
        return measure(gradients.reducer, tuning, all_questions(tuning))
