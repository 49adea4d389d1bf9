"""A run folder of any length without training: all records, with realistic values.

    python -m tests.support.made_up_run /tmp/long --steps 100000 --ranks 16

The folder depends only on the arguments.  The real planning code makes the plan, for two nodes.
"""

import argparse
import base64
import json
import math
import random
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from megabatch.planning.algorithms import candidate_plans
from megabatch.planning.choosing import all_questions, choose, confirm, open_questions, with_measurements
from megabatch.planning.cost import Link
from megabatch.planning.pipeline import Gradient, RecordedBackward
from megabatch.planning.topology import regular
from megabatch.planning.tuning import Tuning
from megabatch.runs import files
from megabatch.runs.model_card import ModelCard
from megabatch.runs.records import (
    Confusion,
    EvaluationRecord,
    Example,
    Lane,
    Mistakes,
    Record,
    ReliabilityBin,
    Span,
    Status,
    StepRecord,
    StepTimes,
    StepTrace,
    TimeBreakdown,
    TracedBucket,
)
from megabatch.runs.totals import RunTotals

NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
BATCH = 8192
CONFIG = """\
name = "{recipe}"
about = "made up"
seed = {seed}

[model]
name = "resnet50"

[data]
source = "/data/imagenet"
image_size = 224

[batch]
global = 8192
micro = 64

[optim]
name = "lars"
learning_rate = {learning_rate}

[precision]
name = "{precision}"

[comm]
algorithm = "auto"
dtype = "same"

[train]
epochs = 90.0
target_top1 = 0.75
evaluate_every = 1
"""


def made_up_plan(ranks: int, hosts: int = 2) -> Tuning:
    """Plan sizes like ResNet-50's: small layers come first in the network, so last in backward."""
    sizes = [2_048_000, 2000] + [
        size for stage in range(16) for size in (2_359_296 >> stage // 4, 1_048_576 >> stage // 4, 2048)
    ]
    backward = RecordedBackward(
        [f"layer{place}.weight" for place in range(len(sizes))],
        [Gradient(4 * size, "fp32") for size in sizes],
        [0.11 * (place + 1) / len(sizes) for place in range(len(sizes))],
    )
    topology = regular(hosts, ranks // hosts)
    links = {axis: Link(20e-6, 1 / 1.2e9, 1 / 8e9) for axis in ("all", "leaders", "inter_node")}
    links["node"] = Link(4e-6, 1 / 9e9, 1 / 9e9, in_memory=True)
    plans = candidate_plans("auto", "same", topology.shape, in_memory=True, on_accelerators=False)
    tuning = choose(backward, plans, topology, links, bucket_mb=None)  # type: ignore[arg-type]
    generator = random.Random(5)
    for ask in (open_questions, all_questions):
        measured_s = {
            question: question.count * question.num_elements * 4e-9 * generator.uniform(0.4, 0.6)
            for question in ask(tuning)[:4]
        }
        tuning = with_measurements(tuning, measured_s)
    return confirm(tuning)


def made_up_trace(tuning: Tuning, step: int) -> StepTrace:
    """Return the predicted trace with all-reduces a tenth later, between a forward pass and an update."""
    forward_s, late = 0.06, 1.12
    backward_s = tuning.backward_s * 1.05
    spans = [
        span("training", "forward", 0.004, forward_s),
        span("training", "backward", forward_s, forward_s + backward_s),
    ]
    buckets = []
    for number, (bucket, passage) in enumerate(zip(tuning.buckets, tuning.passages, strict=True)):
        at = [forward_s + late * moment for moment in passage]
        spans.append(span("node", "reduce_scatter in the node", at[0], at[1], number))
        if at[3] > at[2]:
            spans.append(span("network", "all_reduce between nodes", at[2], at[3], number))
            spans.append(span("network", "all_reduce between nodes", at[3], at[3] + 0.0008, number, is_wait=True))
            spans.append(span("node", "all_gather in the node", at[4], at[5], number))
        buckets.append(
            TracedBucket(
                bucket=number,
                num_bytes=bucket.num_bytes,
                plan=bucket.plan.name,
                ready_s=forward_s + bucket.ready_s,
                reduced_s=at[5],
            )
        )
    reduced_s = max(bucket.reduced_s for bucket in buckets)
    ended_s = max(forward_s + backward_s, reduced_s)
    spans.append(span("training", "wait for all-reduces", forward_s + backward_s, ended_s, is_wait=True))
    spans.append(span("training", "update", ended_s, ended_s + 0.011))
    return StepTrace(step=step, duration_s=ended_s + 0.011, spans=spans, buckets=buckets)


def span(lane: Lane, name: str, begin_s: float, end_s: float, bucket: int | None = None, is_wait: bool = False) -> Span:
    return Span(lane=lane, name=name, begin_s=begin_s, end_s=end_s, bucket=bucket, is_wait=is_wait)


def png(number: int, size: int = 28) -> str:
    """Return a small grey picture in base64."""
    rows = b"".join(
        b"\0" + bytes(int(127 + 120 * math.sin(number + x / (2 + number % 5)) * math.cos(y / 4)) for x in range(size))
        for y in range(size)
    )

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(whole).decode()


def made_up_mistakes(step: int, classes: int, generator: random.Random) -> Mistakes:
    counts = [1000] * classes
    pairs = {
        (label, generator.randrange(classes)): generator.randint(1, 90)
        // (1 + abs(label - generator.randrange(classes)) // 2)
        + 1
        for label in range(classes)
        for _ in range(6)
    }
    confusions = [
        Confusion(label, predicted, count) for (label, predicted), count in pairs.items() if label != predicted
    ]
    examples = [
        Example(
            sample=31 * number,
            label=number % classes,
            predicted=(number + 1 + number % 3) % classes,
            confidence=0.999 - number / 200,
            picture=png(number),
        )
        for number in range(24)
    ]
    return Mistakes(
        step=step,
        class_counts=counts,
        confusions=sorted(confusions, key=lambda pair: -pair.count),
        examples=examples,
    )


def made_up_records(
    steps: int,
    ranks: int = 4,
    classes: int = 10,
    seed: int = 1,
    fp16: bool = True,
    speed: float = 1.0,
    evaluations: int = 30,
    learning_rate: float = 12.0,
) -> Iterator[Record]:
    """Yield records of a run with a busy file server, a slow rank 5 and occasional gradient overflows."""
    generator = random.Random(seed)
    wall_s, scale, per_epoch = 0.0, 65536.0, max(1, steps // 90)
    every = max(1, steps // evaluations)
    for step in range(1, steps + 1):
        done = step / steps
        slow = 1.8 if 0.55 < done < 0.6 else 1.0  # the file server is busy
        data_s = max(0.0, generator.gauss(0.02, 0.006)) * slow**3
        forward_s, backward_s = generator.gauss(0.055, 0.002), generator.gauss(0.11, 0.004)
        comm_s, update_s = max(0.0, generator.gauss(0.025, 0.006)), 0.011
        checkpoint_s = 0.4 if step % (every // 2 or 1) == 0 else 0.0
        other_s = 0.002
        parts = [speed * part for part in (data_s, forward_s, backward_s, comm_s, update_s)]
        wall_s += sum(parts) + checkpoint_s + other_s
        skipped = fp16 and generator.random() < 0.0008
        scale = scale / 2 if skipped else min(scale * 2, 2.0**17) if step % 500 == 0 else scale
        loss = (
            6.9 * math.exp(-3.1 * done)
            + 0.9
            + abs(learning_rate - 12) / 20
            + generator.gauss(0, 0.12) * (1.2 - done)
            + (3.0 if generator.random() < 2e-4 else 0)
        )
        yield StepRecord(
            step=step,
            epoch=step / per_epoch,
            loss=loss,
            top1=min(1.0, max(0.0, 0.74 * (1 - math.exp(-4.5 * done)) + generator.gauss(0, 0.01))),
            lr=learning_rate * min(1.0, 18 * done) * (1 - done) ** 2,
            loss_scale=scale if fp16 else 1.0,
            skipped=skipped,
            image_size=224,
            images_per_s=BATCH / sum(parts),
            data_wait_s=parts[0],
            data_wait=TimeBreakdown(read=0.2 * parts[0], decode=0.65 * parts[0], augment=0.15 * parts[0]),
            comm_wait_s=parts[3],
            straggler=min(5, ranks - 1),
            straggler_delay_s=0.004,
            evaluated=step % every == 0,
            wall_s=wall_s,
            times=StepTimes(
                data=parts[0],
                forward=parts[1],
                backward=parts[2],
                comm=parts[3],
                update=parts[4],
                checkpoint=checkpoint_s,
                other=other_s,
            ),
        )
        if step % every == 0 or step == steps:
            wall_s += 9.0
            top1 = (0.765 - abs(learning_rate - 12) / 400) * (1 - math.exp(-4.5 * done)) + generator.gauss(0, 0.004)
            waits = [max(0.0, generator.gauss(0.024, 0.003)) * every for _ in range(ranks)]
            waits[min(5, ranks - 1)] *= 0.35
            yield EvaluationRecord(
                step=step,
                epoch=step / per_epoch,
                top1=min(1.0, max(0.0, top1)),
                top5=min(1.0, max(0.0, top1 + 0.18)),
                test_loss=5.0 * math.exp(-2.6 * done) + 0.95,
                class_top1=[min(1.0, max(0.0, generator.gauss(top1, 0.1))) for _ in range(classes)],
                samples_evaluated=1000 * classes,
                precision=min(1.0, max(0.0, top1)),
                balanced_accuracy=min(1.0, max(0.0, top1)),
                f1=min(1.0, max(0.0, top1)),
                ece=0.05,
                reliability=[ReliabilityBin(100 * n, (n + 0.5) / 15, n / 15) for n in range(15)],
                resident_mb=2100 + 300 * done,
                device_mb=14_200 + 100 * done,
                wall_s=wall_s,
                times=StepTimes(evaluation=8.9, other=0.1),
                rank_waits_s=waits,
            )


def log_of(steps: int, seconds: float) -> str:
    """Return a log with a fault after two fifths of the run, which resumes from a slightly earlier step."""

    def at(second: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1_794_000_000 + second))

    resumed = int(0.38 * steps)
    fault_s = 0.4 * seconds
    return (
        f"{at(0)} begins at step 0\n"
        f"{at(0.15 * seconds)} warning: checkpoints cannot be written to /scratch: No space left on device\n"
        f"{at(0.17 * seconds)} saved: all pending data is written\n"
        f"{at(fault_s)} rank 5: RuntimeError: Connection closed by peer [10.0.0.2]\n"
        '  Traceback (most recent call last):\n    File "loop.py", line 1\n'
        "  RuntimeError: Connection closed by peer [10.0.0.2]\n"
        f"{at(fault_s + 60)} begins at step {resumed}\n"
        f"{at(seconds + 120)} finished after step {steps}\n"
    )


def make_run(
    folder: Path,
    *,
    steps: int = 400,
    ranks: int = 4,
    classes: Sequence[str] = NAMES,
    seed: int = 1,
    fp16: bool = True,
    recipe: str = "resnet50-imagenet-8k",
    status: Status | None = "finished",  # None: killed, so without a summary
    learning_rate: float = 12.0,
    speed: float = 1.0,
    evaluations: int = 30,
) -> Path:
    folder.mkdir(parents=True)
    config = CONFIG.format(recipe=recipe, seed=seed, precision="amp" if fp16 else "fp32", learning_rate=learning_rate)
    (folder / files.CONFIG).write_text(config)
    environment = {
        "megabatch": "0.1.0",
        "torch": "2.13.0",
        "host": "node-0",
        "gpus": ["NVIDIA A100-SXM4-80GB"] * (ranks // 2),
        "command": f"megabatch train {recipe} optim.learning_rate={learning_rate}",
        "variables": {"OMP_NUM_THREADS": "8"},
    }
    (folder / files.ENVIRONMENT).write_text(json.dumps(environment))
    totals = RunTotals(global_batch=BATCH, target_top1=0.75)
    encoder = msgspec.json.Encoder()
    with (folder / files.METRICS).open("wb") as rows:
        for record in made_up_records(steps, ranks, len(classes), seed, fp16, speed, evaluations, learning_rate):
            totals.add(record, record.wall_s)
            rows.write(encoder.encode(record) + b"\n")
    (folder / files.LOG).write_text(log_of(steps, totals.wall_s))
    if status:
        (folder / files.SUMMARY).write_bytes(msgspec.json.encode(totals.summary(status)))
    tuning = made_up_plan(ranks) if ranks > 1 else None
    if tuning:
        (folder / files.PLAN).write_bytes(msgspec.json.encode(tuning))
        (folder / files.STEP_TRACE).write_bytes(msgspec.json.encode(made_up_trace(tuning, min(100, steps))))
    mistakes = made_up_mistakes(steps, len(classes), random.Random(seed))
    (folder / files.MISTAKES).write_bytes(msgspec.json.encode(mistakes))
    card = ModelCard(
        model={"name": "resnet50"},
        classes=list(classes),
        num_channels=1,
        image_size=224,
        test_image_size=224,
        center_crop=0.875,
        mean=[0.0],
        deviation=[1.0],
        precision="fp32",
        recipe={},
    )
    (folder / files.MODEL).write_text(card.to_json())
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=12.0)
    parser.add_argument("--speed", type=float, default=1.0)
    given = vars(parser.parse_args())
    number = given.pop("classes")
    make_run(given.pop("folder"), classes=NAMES if number == 10 else [f"class {n}" for n in range(number)], **given)
