"""Images of noise in place of a recipe's own, for what measures and does not train."""

from megabatch.data.images import DataSet
from megabatch.data.settings import DataSettings, SyntheticSettings
from megabatch.data.shapes import DataShape
from megabatch.data.sources import load_data_set


def noise_like(shape: DataShape, image_size: int) -> DataSet:
    noise = SyntheticSettings(train=shape.num_train, test=1, classes=shape.num_classes, channels=shape.num_channels)
    return load_data_set(DataSettings(source="synthetic", image_size=image_size, synthetic=noise))
