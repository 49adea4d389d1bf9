"""A recipe as the simulator takes it: its workload, batch, length and all-reduce."""

from typing import NamedTuple

from megabatch.config.schema import RunConfig
from megabatch.data.shapes import IMAGENET, DataShape
from megabatch.data.sources import NoSource, infer_shape
from megabatch.preflight.count import count_workload
from megabatch.simulate.job import Job
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import STORED, Workload, load_workload


class RecipeJob(NamedTuple):
    job: Job
    has_images: bool  # else as many as ImageNet has are assumed


def job_of_recipe(config: RunConfig) -> RecipeJob:
    """Of as many ranks as one likes; the images need not be there."""
    try:
        shape, has_images = infer_shape(config.data), True
    except NoSource:
        shape, has_images = IMAGENET, False
    comm = config.comm
    job = Job(
        name=config.name,
        workload=workload_of(config, shape),
        precision=config.precision.name,
        all_reduce=AllReduceSettings(
            dtype=comm.dtype,
            algorithm=comm.algorithm,
            bucket_mb=None if comm.bucket_mb == "auto" else comm.bucket_mb,
        ),
        global_batch=config.batch.global_batch,
        microbatch=config.batch.microbatch,
        num_train=shape.num_train,
        num_test=shape.num_test,
        epochs=config.train.epochs if config.train.steps is None else None,
        num_steps=config.train.steps,
        evaluate_every=config.train.evaluate_every,
    )
    return RecipeJob(job, has_images)


def workload_of(config: RunConfig, shape: DataShape) -> Workload:
    """The stored one if it is of this very network; else it is counted."""
    model, image_size = config.model, config.data.image_size
    if model.name in STORED and not model.options and not model.freeze and shape.num_channels == IMAGENET.num_channels:
        stored = load_workload(model.name)
        if (stored.image_size, stored.num_classes) == (image_size, shape.num_classes):
            return stored
    return count_workload(model, image_size, shape.num_classes, shape.num_channels)
