"""What `megabatch bench cluster` is asked to measure: read from its options and checked before anything is started."""

from collections.abc import Sequence

from msgspec import Struct

from megabatch.errors import UserError, require_one_of
from megabatch.models.catalog import MODELS
from megabatch.planning.plan import COMM_DTYPES, CommDtype

MIN_HOSTS, MAX_HOSTS = 2, 4
MAX_RANKS = 4  # of a host
MAX_TRAINING_RANKS = 4  # in all: each has AlexNet's 61 million parameters ten times
MIN_GBPS, MAX_GBPS = 0.01, 100.0

Ranks = tuple[int, ...]  # of each host


class Request(Struct, frozen=True, kw_only=True):
    num_hosts: int
    setups: list[Ranks]
    rates_gbps: list[float]
    wires: list[CommDtype]
    models: list[str]
    compares: bool  # force each algorithm too
    trains: bool  # instead of all-reduces alone


def read_request(
    num_hosts: int,
    ranks_per_host: str | None,
    gbps: str | None,
    wire: str | None,
    models: Sequence[str] | None,
    compares: bool,
    trains: bool,
) -> Request:
    """Options as on the command line; None where they are left out."""
    if not MIN_HOSTS <= num_hosts <= MAX_HOSTS:
        near = clamp(num_hosts, MIN_HOSTS, MAX_HOSTS)
        raise UserError(f"--hosts={num_hosts} must be {MIN_HOSTS} to {MAX_HOSTS}; nearest: --hosts={near}")
    if trains and (models or compares):
        raise UserError(
            f"--train with {'--model' if models else '--compare'}: a training is of alexnet_bn, ours beside stock DDP; "
            "leave out one of them"
        )
    defaults = ("2", "1", "bf16") if trains else ("2,4", "1,2.5", "fp32,bf16")
    setups, rates, wires = (given or usual for given, usual in zip((ranks_per_host, gbps, wire), defaults, strict=True))
    request = Request(
        num_hosts=num_hosts,
        setups=[read_setup(word, num_hosts) for word in setups.split(",")],
        rates_gbps=[read_rate(word) for word in rates.split(",")],
        wires=[read_dtype(word) for word in wires.split(",")],
        models=[] if trains else [read_model(name) for name in models or ("resnet50", "alexnet")],
        compares=compares,
        trains=trains,
    )
    for ranks in request.setups if trains else ():
        if sum(ranks) > MAX_TRAINING_RANKS:
            raise UserError(
                f"--train with --ranks-per-host={name_setup(ranks)} on {num_hosts} hosts has {sum(ranks)} ranks; "
                f"memory is for {MAX_TRAINING_RANKS}: --hosts=2 --ranks-per-host=2"
            )
    return request


def read_setup(word: str, num_hosts: int) -> Ranks:
    """On two hosts 2 -> (2, 2), and 2+1 -> (2, 1)."""
    numbers = word.split("+")
    if not all(number.isdecimal() for number in numbers):
        raise UserError(
            f"--ranks-per-host={word!r} must be a number, or one number per host joined by +; "
            f"such as 2, or {'+'.join(['2', *['1'] * (num_hosts - 1)])}"
        )
    if len(numbers) not in (1, num_hosts):
        raise UserError(
            f"--ranks-per-host={word} has numbers for {len(numbers)} hosts, and there are {num_hosts}; "
            f"give {num_hosts}, or --hosts={clamp(len(numbers), MIN_HOSTS, MAX_HOSTS)}"
        )
    near = [clamp(int(number), 1, MAX_RANKS) for number in numbers]
    if near != list(map(int, numbers)):
        raise UserError(
            f"--ranks-per-host={word}: a host has 1 to {MAX_RANKS} ranks; "
            f"nearest: --ranks-per-host={'+'.join(map(str, near))}"
        )
    return tuple(near * num_hosts if len(near) == 1 else near)


def name_setup(ranks: Ranks) -> int | str:
    return ranks[0] if len(set(ranks)) == 1 else "+".join(map(str, ranks))


def read_rate(word: str) -> float:
    try:
        gbps = float(word)
    except ValueError:
        raise UserError(f"--gbps={word!r} must be a number, or several separated by commas; such as 1,2.5") from None
    if not MIN_GBPS <= gbps <= MAX_GBPS:
        near = MIN_GBPS if gbps < MIN_GBPS else MAX_GBPS
        raise UserError(f"--gbps={word} must be {MIN_GBPS:g} to {MAX_GBPS:g}; nearest: --gbps={near:g}")
    return gbps


def read_dtype(word: str) -> CommDtype:
    require_one_of("--wire", word, COMM_DTYPES)
    return next(dtype for dtype in COMM_DTYPES if dtype == word)


def read_model(name: str) -> str:
    require_one_of("--model", name, MODELS)
    return name


def clamp(number: int, least: int, most: int) -> int:
    return min(max(number, least), most)
