"""Step records with invented values."""

from megabatch.runs.records import StepRecord, StepTimes


def step_record(step: int, epoch: float, loss: float) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=epoch,
        loss=loss,
        lr=0.1,
        loss_scale=1.0,
        skipped=False,
        image_size=8,
        images_per_s=1.0,
        data_wait_s=0.0,
        comm_wait_s=0.0,
        straggler=0,
        straggler_delay_s=0.0,
        wall_s=float(step),
        times=StepTimes(),
    )
