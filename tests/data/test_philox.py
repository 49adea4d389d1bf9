import numpy as np
import pytest

from megabatch.data.pipeline.order import draw, draw_below, dropout_seed, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    # Known answers from Random123 for philox4x32-10.
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    a, b, c, d = (np.array([word], np.uint64) for word in counter)
    assert [int(word[0]) for word in philox((a, b, c, d), (key[0], key[1]))] == expected


def test_a_draw_depends_only_on_its_counter() -> None:
    together = draw(7, 1, np.arange(100), 3)
    for sample in (0, 42, 99):
        alone = draw(7, 1, [sample], [3])
        assert [int(words[sample]) for words in together] == [int(words[0]) for words in alone]


def test_draws_depend_on_seed_stream_and_both_counters() -> None:
    drawn = {
        tuple(int(word[0]) for word in draw(*place, [first], [second]))
        for place in ((1, 0), (1, 1), (2, 0), (2**40 + 1, 0))
        for first, second in ((5, 6), (6, 5), (2**40 + 5, 6))
    }
    assert len(drawn) == 12


def test_draws_below_a_limit_are_uniform() -> None:
    counts = np.bincount(draw_below(5, draw(1, 0, np.arange(50_000), 0)[0]), minlength=5)
    assert len(counts) == 5
    assert abs(counts - 10_000).max() < 450  # five standard deviations


def test_dropout_is_seeded_differently_for_every_microbatch() -> None:
    seeds = {dropout_seed(1, step, microbatch) for step in range(50) for microbatch in range(8)}
    assert len(seeds) == 400
