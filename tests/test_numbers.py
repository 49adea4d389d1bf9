"""Numbers as text."""

from megabatch.io.numbers import duration, three_digits


def test_durations_have_their_two_largest_units() -> None:
    expected = {0.4: "400 ms", 59.4: "59.4 s", 59.999: "60.0 s", 250.0: "4 min 10 s", 7_830.0: "2 h 10 min"}
    assert {seconds: duration(seconds) for seconds in expected} == expected


def test_three_digits_keeps_trailing_zeros() -> None:
    expected = {None: "-", 0.0: "0", 0.0421: "0.042", 0.421: "0.421", 7.3: "7.30", 48.21: "48.2", 1204.4: "1,204"}
    assert {value: three_digits(value) for value in expected} == expected
