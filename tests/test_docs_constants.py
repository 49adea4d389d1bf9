"""Numbers in README and docs that are constants of the code must agree with it.

A fact is a page, a sentence with a gap for each number, and the code's values.  Line breaks do not matter.
`docs/settings.md` is not checked here: it is generated from the code, and `tests/config/test_reference.py` compares it.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from megabatch_lab.bench import cluster, hosts, merging, simulator
from megabatch_lab.bench import command as bench
from megabatch_lab.chaos import command as chaos_command
from megabatch_lab.chaos import faults, namespaces, site
from megabatch_lab.chaos import run as chaos_run
from megabatch_lab.chaos.command import chaos
from megabatch_lab.fuzz import images as fuzz_images
from megabatch_lab.fuzz.catalog import FORMATS
from megabatch_lab.fuzz.command import fuzz

from megabatch.cli.lr_range import lr_range
from megabatch.cli.pack import pack
from megabatch.comm import api as hook
from megabatch.comm import phases
from megabatch.comm import tune as probe
from megabatch.comm.accelerator.device_group import backend_timeout_s
from megabatch.comm.faults import failure, watchdog
from megabatch.config import loading as values
from megabatch.config.loading import load_config
from megabatch.config.recipes import recipe_names
from megabatch.config.reference_results import QUANTITIES, REFERENCE_RESULTS
from megabatch.data import catalog as stored_size
from megabatch.data.pipeline import augment, decode, reader, threads
from megabatch.data.pipeline import decode as scans
from megabatch.data.settings import AUTO_HELD_OUT, CENTER_CROP
from megabatch.data.sources import labels as class_names
from megabatch.data.sources import labels as splits
from megabatch.data.sources.files import IMAGE_SUFFIXES
from megabatch.data.sources.shapes import FASHION_MNIST_10K, MOST_CLASSES
from megabatch.errors import UserError
from megabatch.experiments import batch_limit
from megabatch.experiments import search as sweep
from megabatch.experiments.design import read_design
from megabatch.experiments.search import HELD_OUT
from megabatch.inference import export
from megabatch.io import arrays as npz
from megabatch.io.toml import DEEPEST, LONGEST_BYTES
from megabatch.models.catalog import MODELS
from megabatch.optim import momentum
from megabatch.planning import choosing, pipeline
from megabatch.planning.buckets import merge
from megabatch.planning.plan import COMM_DTYPES
from megabatch.precision import loss_scale
from megabatch.preflight import preview as commands
from megabatch.preflight.selftest import photos
from megabatch.ranks import collectives, devices, launch, store
from megabatch.ranks import machine as sockets
from megabatch.report import verdict as ending_rules
from megabatch.report import verdict as findings
from megabatch.report import verdict as time_rules
from megabatch.report import view as report_view
from megabatch.runs import comparison, folder
from megabatch.runs.intervals import CONFIDENCE
from megabatch.simulate import device
from megabatch.telemetry import activity, timeline
from megabatch.training import evaluate, fit, screen
from megabatch.training import numerics as arithmetic
from megabatch.training.checkpoint import save as background
from tests.support.pages import ROOT
from tools.matrix import PAIRS

GAP = "{}"
MIB = 2**20
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ORDINALS = {2: "second", 9: "ninth"}
SHARES = {2: "half", 3: "third", 4: "quarter", 5: "fifth", 8: "eighth", 10: "tenth", 12: "twelfth"}


class Fact(NamedTuple):
    page: str
    sentence: str  # with a gap for each value
    values: tuple[object, ...]

    @property
    def filled(self) -> str:
        return self.sentence.format(*map(shown, self.values))


def shown(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def word(number: float) -> str:
    assert number == int(number)
    return WORDS[int(number)]


def part(share: float) -> str:
    """Return a share as a word: 0.1 is "tenth"."""
    whole = round(1 / share)
    assert abs(whole * share - 1) < 1e-9
    return SHARES[whole]


def percent(share: float) -> float:
    return round(100 * share, 9)


def power_of_two(number: float) -> str:
    return str(round(number).bit_length() - 1) if number >= 1 else str(-(round(1 / number).bit_length() - 1))


def superscript(text: str) -> str:
    return text.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def option(command: Callable[..., Any], name: str) -> Any:
    """Return the default of a command-line option or of an argument."""
    default = inspect.signature(command).parameters[name].default
    assert default is not inspect.Parameter.empty
    return default


def facts(page: str, *rows: tuple[object, ...]) -> list[Fact]:
    return [Fact(page, str(sentence), tuple(numbers)) for sentence, *numbers in rows]


def find_difference(fact: Fact, text: str) -> str | None:
    """Return the difference between page and code, with page and sentence, or None."""
    text = " ".join(text.split())
    if re.search(rf"(?<![\d.,]){re.escape(fact.filled)}(?![\d])", text):  # "10 s" does not match "110 s"
        return None
    words = r"\S+(?: \S+){0,20}?"  # one word for a gap at the start, or the match would start too early
    pattern = words.join(map(re.escape, fact.sentence.split(GAP))).removeprefix(words)
    found = re.search(rf"\S+{pattern}" if fact.sentence.startswith(GAP) else pattern, text)
    if found is None:
        return f"{fact.page} has no sentence {fact.sentence!r} with {fact.values}; add it, or change the fact"
    return f"{fact.page}: {found.group()!r} is {fact.filled!r} in the code; change one of them"


def refusal(override: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config("fashion", [override])
    return str(caught.value).partition("; ")[0]


def fuzzed_in_tests() -> int:
    found = re.search(r'"--inputs", "(\d+)"', (ROOT / "tests/lab/fuzz/test_command.py").read_text())
    assert found
    return int(found[1])


PYTHONS = sorted({pair.partition(":")[0] for pair in PAIRS})
TORCHES = sorted({".".join(pair.partition(":")[2].split(".")[:2]) for pair in PAIRS})
RECIPES = {name: load_config(name) for name in recipe_names()}
BATCH = {name: config.batch.global_batch for name, config in RECIPES.items()}
FASHION = RECIPES["fashion"]
EMBEDDED = FASHION_MNIST_10K
REFERENCE_TOP1 = next(result.top1 for result in REFERENCE_RESULTS if result.source == "megabatch, fashion")
AVX_512_TOP1 = 0.9075  # result of `make train`: not a constant of the code, but the pages must agree on it
SPANS = [result.bn_span for result in REFERENCE_RESULTS if result.bn_span]
WIDENED = {quantity.setting: quantity.factor for quantity in QUANTITIES}
TRAINING = dict(setting.split("=") for setting in cluster.TRAINING)
ROUNDOFF = [superscript(power_of_two(COMM_DTYPES[dtype].roundoff)) for dtype in ("bf16", "fp16")]
CRITERION = read_design("large-batch-90").criteria[0]
SEARCHES = {name: read_design(name).search for name in ("large-batch", "large-batch-90")}

FACTS = [
    *facts(
        "README.md",
        ("with Python {} to {} and torch {} to {}", PYTHONS[0], PYTHONS[-1], TORCHES[0], TORCHES[-1]),
        ("`make matrix` with Python {}", ", ".join(pair.replace(":", " and torch ") for pair in PAIRS)),
        ("The batch stays {} on any number of ranks", BATCH["resnet50-imagenet-8k"]),
        ("| models; pretrained weights | **{}; none**", len(MODELS)),
        ("Fashion-MNIST, {} images, batch {}, {} epochs", EMBEDDED.num_train, BATCH["fashion"], FASHION.train.epochs),
        ("{} top-1 in 47 s on a CPU with AVX-512; {} with AVX2 only", AVX_512_TOP1, REFERENCE_TOP1),
    ),
    *facts(
        "docs/README.md",
        ("| {} inputs: all read, or rejected with a one-line error | `megabatch fuzz` |", option(fuzz, "inputs")),
    ),
    *facts(
        "docs/comparison.md",
        ("| models; pretrained weights | **{}; none**", len(MODELS)),
        ("recipes up to a batch of {}", max(BATCH.values())),
    ),
    *facts(
        "CHANGELOG.md",
        ("{} inputs in `make test-lab`", fuzzed_in_tests()),
        ("JPEGs of more than {} scans", scans.MOST_SCANS),
    ),
    *facts(
        "docs/attach.md",
        ("in parts of at most {} MiB", pipeline.PART_BYTES / MIB),
        ("about 2·2{} (bf16) or 2·2{} (fp16)", *ROUNDOFF),
        ("does not arrive within `timeout_s` ({})", option(hook.attach, "timeout_s")),
    ),
    *facts("docs/augmentation.md", ("a box of {} to {} % of the image", *map(percent, augment.ERASED_AREAS))),
    *facts(
        "docs/batch-size.md",
        ("on every {}th step (`train.noise_every`", FASHION.train.noise_every),
        ("(`--margin {}` points", batch_limit.Limits(batches=[]).margin_points),
    ),
    *facts(
        "docs/clusters.md",
        ("Ranks wait up to {} s for the name of the first pod", store.TIMEOUT_S),
        ("--node-rank=I --master-addr=HOST --master-port={}", commands.RENDEZVOUS.rpartition("=")[2]),
        ("if it costs more than {} % of the time", percent(screen.REPORTED_STRAGGLER_SHARE)),
        ("a trace of its newest {} steps", timeline.KEPT_STEPS),
    ),
    *facts(
        "docs/communication.md",
        ("in predicted cost (within {} times)", choosing.CLOSE),
        ("take {} times as long or more (or {} times less)", screen.REPORTED_DRIFT, screen.REPORTED_DRIFT),
        ("in shared memory (`shared_memory`) | {} MiB |", choosing.IN_NODE_MB),
        ("| `flat` | {} MiB on one node, else chosen |", choosing.IN_NODE_MB),
        ("in 16 bits | {} MiB |", choosing.IN_NODE_MB),
        ("at most about 2·2{} (bf16) or 2·2{} (fp16)", *ROUNDOFF),
        ("In fp16 contributions up to 2{} become 0", superscript(power_of_two(COMM_DTYPES["fp16"].underflow))),
        ("about p·2{} (bf16) or p·2{} (fp16)", *ROUNDOFF),
        ("cut into parts of at most {} MiB", pipeline.PART_BYTES / MIB),
        ("(the next {} parts go first", word(phases.DEPTH)),
        ("a prefix keeps the {} most promising states", word(option(merge, "width"))),
        ("end within {} % of the earliest", percent(option(merge, "tolerance"))),
        ("expose at most {} times as much", choosing.SAME),
        ("the median of {} rounds after one to warm up", word(probe.ROUNDS)),
        ("small all-reduces, {} elements", probe.SMALL),
        (
            "of a bucket's size, {} rounds; a bucket above {} MiB is measured at {} MiB",
            word(probe.ROUNDS),
            *[choosing.MEASURED_ELEMENTS * 4 / MIB] * 2,
        ),
        ("keeps buckets of {} MiB", choosing.IN_NODE_MB),
        ("the node's thread runs {} parts ahead", word(phases.DEPTH)),
        ("two cores for all nodes, {} rounds", option(bench.cluster, "rounds")),
        ("a queue of {} ms", 1e3 * namespaces.QUEUE_S),
        ("one plain TCP stream is measured for {} a second", part(hosts.STREAM_S)),
        ("within {} % of nominal in {} attempts", percent(hosts.STREAM_TOLERANCE), word(hosts.STREAM_ATTEMPTS)),
        (
            "within {} % and {} KiB; otherwise the benchmark fails",
            percent(cluster.BYTES_TOLERANCE),
            cluster.BYTES_SLACK / 1024,
        ),
        (
            "The {} % are for headers, 66 bytes per segment; the {} KiB for barriers",
            percent(cluster.BYTES_TOLERANCE),
            cluster.BYTES_SLACK / 1024,
        ),
        ("the table has the median of {} rounds", word(option(bench.cluster, "rounds"))),
        ("its default buckets ({} MiB, then {} MiB)", *[size / MIB for size in cluster.DDP_CAPS_BYTES]),
        ("{} steps of one, then of the other", word(cluster.STEPS_PER_BLOCK)),
        ("synthetic images of {} pixels, {} per rank and step", TRAINING["data.image_size"], TRAINING["batch.micro"]),
        ("NCCL's timeout ({} timeouts and a minute)", (backend_timeout_s(1000) - 60) / 1000),
        ("does not return within {} s, the process ends", failure.LEFT_WITHIN_S),
    ),
    *facts(
        "docs/compare.md",
        ("standard deviation and {} % interval", percent(CONFIDENCE)),
        ("| `format` | {} |", comparison.FORMAT),
    ),
    *facts(
        "docs/data.md",
        ("Suffixes are {}, in upper or lower case", " ".join(f"`{suffix}`" for suffix in IMAGE_SUFFIXES)),
        ("holds out a {} if there are none", part(AUTO_HELD_OUT)),
        ("| training | {} |", " ".join(f"`{word}`" for word in splits.TRAIN_WORDS)),
        ("| validation | {} |", " ".join(f"`{word}`" for word in splits.TEST_WORDS[0])),
        ("| test | {} |", " ".join(f"`{word}`" for word in splits.TEST_WORDS[1])),
        ("[--quality {}] [--shard-mb {}]", option(pack, "quality"), option(pack, "shard_mb")),
        ("by default {}, which is 224 of 256", CENTER_CROP),
        ("by the median shorter side of {} training images", stored_size.SIZE_SAMPLES),
        ("the crop is {} times its target or larger", decode.LEAST_MARGIN * min(decode.DCT_SCALES)),
        ("decoded at 1/{}, 1/{} or 1/{} of its size", *sorted(decode.DCT_SCALES)),
        ("the box moved by less than {}, {} or {} pixels", *sorted(decode.DCT_SCALES)),
        ("at most {} batches are in progress or waiting", word(reader.PREFETCHED)),
        (
            "At least {} images are in progress or waiting, as far as they fit into {} MiB",
            reader.PREFETCHED_IMAGES,
            reader.PREFETCHED_BYTES >> 20,
        ),
        ("the {} abandoned thread ends the run", ORDINALS[threads.MAX_ABANDONED + 1]),
        (
            "more than {} scans, or more than 2^{} pixels over all scans",
            scans.MOST_SCANS,
            power_of_two(scans.MOST_SCANNED),
        ),
        ("with more than {} bytes or pixels are rejected", decode.MOST_SLOW),
        (
            "more than {} times their size ({} MiB are always allowed)",
            npz.MOST_EXPANSION,
            npz.EXPANDED_FREELY / MIB,
        ),
        ("plain text of up to {} characters", class_names.MAX_NAME_LENGTH),
        ("integers from 0 to {}.", MOST_CLASSES - 1),
    ),
    *facts(
        "docs/first-run.md",
        (
            "data fashion-mnist-10k: {} + {} images of {} pixels, {} channel, {} classes",
            EMBEDDED.num_train,
            EMBEDDED.num_test,
            FASHION.data.image_size,
            EMBEDDED.num_channels,
            EMBEDDED.num_classes,
        ),
        ("batch {} = {} micro x 2 accumulated x 2 ranks", BATCH["fashion"], FASHION.batch.microbatch),
        (
            "steps {} in {} epochs, {} at {}",
            int((FASHION.train.epochs or 0) * EMBEDDED.num_train / BATCH["fashion"]),
            FASHION.train.epochs,
            FASHION.optim.name,
            FASHION.optim.learning_rate,
        ),
        ("12 epochs, top-1 {} (megabatch, fashion)", REFERENCE_TOP1),
        ("With AVX2 only, which rounds differently, top-1 is {}", REFERENCE_TOP1),
        ("finished top-1 {} (best", AVX_512_TOP1),
        ("target {} reached after", FASHION.train.target_top1),
    ),
    *facts(
        "docs/gpus.md",
        ("--master-addr=HOST --master-port={}", commands.RENDEZVOUS.rpartition("=")[2]),
        ("longer than `comm.timeout_s` ({} s)", FASHION.comm.timeout_s),
        ("`CUBLAS_WORKSPACE_CONFIG={}`", arithmetic.DETERMINISTIC_WORKSPACES[0]),
        ("weights of up to {} elements", momentum.SMALL),
        ("| CUDA 13 | {} or newer |", devices.OLDEST_DRIVER[13]),
        ("| CUDA 12.9 | {} or newer |", devices.OLDEST_DRIVER[12]),
        ("{} photos of noise, {} x {} pixels", photos.JPEGS, *photos.JPEG_SIZE),
    ),
    *facts(
        "docs/precision.md",
        ("The scale starts at {} times the global batch", loss_scale.INITIAL_SCALE),
        ("doubles after {} steps without an overflow", loss_scale.GROWTH_INTERVAL),
        ("and never falls below {}.", loss_scale.MIN_SCALE),
        ("with a scale of {}, or {} steps in a row", loss_scale.MIN_SCALE, loss_scale.MAX_OVERFLOWS_IN_A_ROW),
    ),
    *facts("docs/python.md", ("names a recipe or a TOML file (default `{}`)", option(fit.fit, "recipe"))),
    *facts(
        "docs/recipes.md",
        ("which the message names (`{}`)", refusal("optim.learning_rate=1e308")),
        ("one line of at most {} characters", values.LONGEST_TEXT),
        ("of at most {} MiB with at most {} nested tables and arrays", LONGEST_BYTES / MIB, DEEPEST),
        (
            "| `fashion` | {} | measured: {} top-1 on the {} test images",
            BATCH["fashion"],
            REFERENCE_TOP1,
            EMBEDDED.num_test,
        ),
        ("[{} on a CPU with AVX-512](first-run.md)", AVX_512_TOP1),
        ("| `fashion-full` | {} |", BATCH["fashion-full"]),
        ("`fashion-8k` | {}; {}; {} |", *[BATCH[f"fashion-{name}"] for name in ("128", "3k", "8k")]),
        ("`fashion-90-4k` | {}; {}; {} |", *[BATCH[f"fashion-90-{name}"] for name in ("64", "1k", "4k")]),
        ("`-64k` | {} to {} | MLPerf", BATCH["resnet50-imagenet-4k"], BATCH["resnet50-imagenet-64k"]),
        ("| `resnet50-imagenet-16k` | {} |", BATCH["resnet50-imagenet-16k"]),
        ("| `resnet50-imagenet-256` | {} |", BATCH["resnet50-imagenet-256"]),
        ("`-32k` | {} to {} | NVCaffe", BATCH["alexnet-bn-imagenet-8k"], BATCH["alexnet-bn-imagenet-32k"]),
        ("| `alexnet-bn-imagenet-64k` | {} |", BATCH["alexnet-bn-imagenet-64k"]),
        ("| `photos` | {} |", BATCH["photos"]),
        ("| `smoke` | {} |", BATCH["smoke"]),
        ("(as 1 - momentum) | {} to twice", part(1 / WIDENED["optim.learning_rate"])),
        (
            "| `optim.weight_decay` | a {} to {} times that |",
            part(1 / WIDENED["optim.weight_decay"]),
            word(WIDENED["optim.weight_decay"]),
        ),
        ("| `batch.micro` | {} to {}, the spans of BatchNorm", min(SPANS), max(SPANS)),
        ("A grid of `--coarse {}` learning rates", option(lr_range, "coarse")),
        ("(by default an {} to {} times the recipe's)", part(1 / sweep.SPAN), word(sweep.SPAN)),
        ("until `--trials {}` are used up", option(lr_range, "trials")),
        ("1/{} of the training images is held out", round(1 / HELD_OUT)),
    ),
    *facts(
        "docs/reliability.md",
        ("named within `comm.timeout_s` ({} s)", FASHION.comm.timeout_s),
        ("break after {} s without an answer", sockets.LOST_AFTER_S),
        ("if it sends nothing for {} s while others wait for it", watchdog.SILENT_S),
        ("thread checks it every {} s", watchdog.LOOK_EVERY_S),
        ("does not return within {} s, it reports this and ends the process", failure.LEFT_WITHIN_S),
        ("ends processes that have not exited after {} s", launch.GRACE_S),
        (
            "the timeout is {} s. After that, an activity counts as stuck only if it takes at least {} times",
            activity.START_UP_TIMEOUT_S,
            word(activity.LONGER),
        ),
        ("There are {} copies at most", word(background.COPIES)),
        ("with `checkpoint.keep` above {} all of them are written", background.COPIES),
        ("({} MiB of them at most)", folder.MOST_WAITING_BYTES / MIB),
        ("tried again after {} s, {} s, {} s, up to a minute", *[folder.pause_s(count) for count in (1, 2, 3)]),
        ("the smoke recipe, lengthened: {} faults, seed {}", option(chaos, "kills"), option(chaos, "seed")),
        ("repeatedly, with {} faults per run", word(faults.FAULTS_A_RUN)),
        (
            "`--max-restarts` in {} runs of {}",
            word(chaos_run.NO_RESTARTS_EVERY - 1),
            word(chaos_run.NO_RESTARTS_EVERY),
        ),
        ("noticed within `comm.timeout_s` ({} s here, unless given)", chaos_command.TIMEOUT.partition("=")[2]),
        ("filled to the last byte, for {} to {} s", *site.HOLD_S["disk"]),
        ("the cable of a node is out for {} to {} s", *site.HOLD_S["link"]),
        ("a {} of the faults wait for the next write", part(faults.WRITE_SHARE)),
        ("after that and {} s more", launch.GRACE_S),
        ("A cable that is out for less than {} s is not noticed", sockets.LOST_AFTER_S),
        ("reported after {} s without an answer (a killed one at once)", sockets.LOST_AFTER_S),
        ("an outage of less than {} s is not noticed", sockets.LOST_AFTER_S),
    ),
    *facts(
        "docs/report.md",
        ("curves are downsampled to {} points", report_view.MOST_POINTS),
        ("waits are below a {} |", part(findings.LIMITS)),
        ("| waiting for images | {} % of the wall time |", percent(findings.WORTH)),
        ("| exposed communication | {} % |", percent(findings.WORTH)),
        ("if the plan predicted a {} or less", part(1 / time_rules.UNEXPLAINED)),
        ("| waiting for one rank | {} %, beyond", percent(findings.WORTH)),
        ("| evaluations, other work | {} % |", percent(findings.LIMITS)),
        ("| checkpoints | {} % |", percent(findings.WORTH)),
        (
            "at most {} times the share of the largest class, and at most a {} of the way",
            findings.NEAR_CHANCE,
            part(findings.ABOVE_CHANCE),
        ),
        ("rose by more than {} point in the last {} |", percent(findings.CHANGED), part(findings.LAST_PART)),
        ("| fell from its best | by more than {} point |", percent(findings.CHANGED)),
        ("is more than {} points above top-1 |", percent(findings.OVERFITS)),
        ("both accuracies are below {} %", percent(findings.LOW)),
        ("and rose by at most {} point in the last {} |", percent(findings.CHANGED), part(findings.LAST_PART)),
        ('needs at least {} steps; "still', findings.FEWEST_STEPS),
        ("| gradients overflowed | {} % of steps |", percent(ending_rules.SKIPPED_WORTH)),
    ),
    *facts(
        "docs/scaling.md",
        ("with the best of {} bucket sizes", word(len(merging.THRESHOLDS_MB))),
        ("over buckets of {} MB, DDP's default", merging.USUAL_MB),
        ("grows by another {} % for each factor e", percent(device.EXTRAPOLATION)),
        ("t0 is about the time of {} images", device.USUAL),
        ("within a factor of {}. One published", round(device.WEAK**device.DEVIATIONS, 1)),
        ("| rows within {}% |", percent(simulator.WIDE_ERROR)),
        ("is off by more than {} % for fused all-reduces", percent(simulator.RATIO_OF_RANKS)),
        ("also miss the {} % between cards", percent(simulator.RATIO_OF_CARDS)),
    ),
    *facts(
        "docs/security.md",
        ("{} inputs of {} formats, on all cores", option(fuzz, "inputs"), len(FORMATS)),
        ("a PNG whose 4 MB become {} GiB", fuzz_images.BOMB / 2**30),
        ("(images with `data.max_pixels` of {} million)", fuzz_images.MAX_PIXELS / 1e6),
        ("more than {} s or {} GiB", option(fuzz, "seconds"), option(fuzz, "memory") / 1024),
        ("{} inputs are part of `make test-lab`", fuzzed_in_tests()),
        ("`megabatch fuzz` ({} inputs, seed {})", option(fuzz, "inputs"), option(fuzz, "seed")),
        ("{} scans of a JPEG and 2^{} pixels over all its scans", scans.MOST_SCANS, power_of_two(scans.MOST_SCANNED)),
        ("more than {} times their size ({} MiB are always allowed)", npz.MOST_EXPANSION, npz.EXPANDED_FREELY / MIB),
        ("| 0 to {}; unique plain text", MOST_CLASSES - 1),
        ("| recipes, overrides | {} MiB, {} levels", LONGEST_BYTES / MIB, DEEPEST),
    ),
    *facts(
        "docs/startup.md",
        ("a few requests for every {} ranks", store.KEYS_AT_ONCE),
        ("(in pieces of {} MiB)", collectives.PIECE_BYTES / MIB),
    ),
    *facts(
        "docs/studies.md",
        (
            "at most {}, and the upper end of the interval below {}",
            CRITERION.max_gap_points,
            CRITERION.max_upper_points,
        ),
        (
            "on held-out training images: a {}, in `large-batch-90` a {}",
            *[part(search.held_out) for search in SEARCHES.values() if search],
        ),
    ),
    *facts("docs/use.md", ("compares confidence and accuracy in {} bins", evaluate.NUM_BINS)),
    *facts("docs/use-weights.md", ("compared with the network on {} images of noise", export.CHECKED_IMAGES)),
]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.page}: {fact.sentence}")
def test_numbers_in_a_page_match_the_code(fact: Fact) -> None:
    difference = find_difference(fact, (ROOT / fact.page).read_text())
    assert difference is None, difference


def test_a_difference_is_reported_with_page_and_sentence() -> None:
    fact = Fact("docs/x.md", "after {} s, {} of {}", (10.0, "three", 4096))
    assert find_difference(fact, "It ends after 10 s, three\nof 4,096 times.") is None
    assert "docs/x.md: 'after 30 s, three of 4,096' is 'after 10 s, three of 4,096'" in str(
        find_difference(fact, "It ends after 30 s, three of 4,096 times.")
    )
    assert find_difference(Fact("docs/x.md", "{} s, {}", (10.0, 4)), "It ends after 110 s, 41.") is not None
    assert "docs/x.md has no sentence 'after {} s, {} of {}'" in str(find_difference(fact, "It ends."))


def test_results_in_the_readme_match_the_documentation() -> None:
    index = (ROOT / "docs/README.md").read_text()
    results = (ROOT / "README.md").read_text().partition("## Results")[2].partition("## ")[0]
    rows = [line.replace("(docs/", "(") for line in results.splitlines() if line.startswith("| ")]
    assert len(rows) > 4 and [row for row in rows if row not in index] == []


def test_facts_are_unique_and_have_a_gap_for_every_value() -> None:
    assert len({fact[:2] for fact in FACTS}) == len(FACTS)
    for fact in FACTS:
        assert fact.sentence.count(GAP) == len(fact.values) >= 1, fact
