"""What `megabatch bench cluster` can be asked for: lists of set-ups, rates, wires and models, read and checked."""

import math
import re
from collections.abc import Sequence

from megabatch.errors import UserError, require_one_of
from megabatch.models.catalog import MODELS
from megabatch.planning.plan import WIRES, Wire

MIN_HOSTS, MAX_HOSTS, MAX_RANKS = 2, 4, 4  # ranks of one host


def require_num_hosts(num_hosts: int) -> None:
    if not MIN_HOSTS <= num_hosts <= MAX_HOSTS:
        near = min(max(num_hosts, MIN_HOSTS), MAX_HOSTS)
        raise UserError(f"--hosts={num_hosts} must be {MIN_HOSTS} to {MAX_HOSTS}; nearest: --hosts={near}")


def read_setups(text: str, num_hosts: int) -> list[tuple[int, ...]]:
    """2,4,2+1 on two hosts -> [(2, 2), (4, 4), (2, 1)]"""
    return [read_setup(word, num_hosts) for word in text.split(",")]


def read_setup(word: str, num_hosts: int) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(\+[0-9]+)*", word):
        raise UserError(
            f"--ranks-per-host={word!r} must be a number, or one per host joined by +; "
            f"such as 2, or {'+'.join(['2'] + ['1'] * (num_hosts - 1))} for {num_hosts} hosts"
        )
    ranks = [int(number) for number in word.split("+")]
    if len(ranks) == 1:
        ranks *= num_hosts
    if len(ranks) != num_hosts:
        raise UserError(
            f"--ranks-per-host={word} names {len(ranks)} hosts, and --hosts={num_hosts}; give as many numbers, or one"
        )
    if not all(1 <= number <= MAX_RANKS for number in ranks):
        near = "+".join(str(min(max(int(number), 1), MAX_RANKS)) for number in word.split("+"))
        raise UserError(
            f"--ranks-per-host={word}: a host has 1 to {MAX_RANKS} ranks here; nearest: --ranks-per-host={near}"
        )
    return tuple(ranks)


def name_setup(ranks: Sequence[int]) -> int | str:
    return ranks[0] if len(set(ranks)) == 1 else "+".join(map(str, ranks))


def read_rates(text: str) -> list[float]:
    return [read_rate(word) for word in text.split(",")]


def read_rate(word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        rate = math.nan
    if not 0.01 <= rate <= 100:
        raise UserError(f"--gbps={word!r} must be a number from 0.01 to 100; such as 1, or 1,2.5")
    return rate


def read_wires(text: str) -> list[Wire]:
    names = text.split(",")
    for name in names:
        require_one_of("--wire", name, WIRES)
    return [wire for wire in WIRES if wire in names]


def read_models(names: Sequence[str]) -> list[str]:
    for name in names:
        require_one_of("--model", name, MODELS)
    return list(names)
