"""How a run would sum its gradients: measured and chosen on real ranks, with images of noise instead of its own."""

from megabatch.comm.tune import measure
from megabatch.config.schema import RunConfig
from megabatch.data.settings import DataSettings, SyntheticSettings
from megabatch.data.sources import foresee_shape, load_data_set
from megabatch.planning.tuning import Tuning
from megabatch.ranks.discover import Place
from megabatch.ranks.store import Notices
from megabatch.ranks.world import choose_device, connect
from megabatch.train.assemble import assemble
from megabatch.train.run import share_cores


def plan_sums(config: RunConfig, place: Place, notices: Notices) -> Tuning:
    """On each rank; every candidate is measured, not only the close ones."""
    shape = foresee_shape(config.data)
    noise = SyntheticSettings(train=shape.num_train, test=1, classes=shape.num_classes, channels=shape.num_channels)
    images = DataSettings(source="synthetic", image_size=config.data.image_size, synthetic=noise)
    with connect(place, choose_device(config.run.device), notices.store, config.comm.timeout_s) as world:
        config = share_cores(config, world)
        gradients = assemble(config, load_data_set(images), world).gradients
        assert gradients.tuning is not None
        calls = [
            (index, place)
            for index, bucket in enumerate(gradients.tuning.buckets)
            for place, candidate in enumerate(bucket.candidates)
            if candidate.measured_s is None and candidate.plan.phases
        ]
        return measure(gradients.reducer, gradients.tuning, calls)
