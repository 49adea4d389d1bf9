"""Numbers as a reader of the page sees them: with separators and units, and no more digits than they have worth."""

import math

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
NOTHING = "-"


def count(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def number(value: float | None, digits: int = 4) -> str:
    """So many significant digits, without an exponent where that can be read."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= 9 or size < -4:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")
    places = max(0, digits - 1 - size)
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def percent(share: float | None, places: int = 0) -> str:
    """A share of 1; little is not nothing."""
    if share is None or not math.isfinite(share):
        return NOTHING
    least = 10.0**-places
    if 0 < 100 * share < least / 2:
        return f"< {least:g} %"
    return f"{100 * share:,.{places}f} %"


def accuracy(share: float | None) -> str:
    """As people quote it: 76.31 %."""
    return percent(share, 2) if share is None or share > 0 else "0.00 %"


def seconds(value: float | None) -> str:
    """A time in the two units that matter."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value < 0:
        return f"-{seconds(-value)}"
    for unit_s, unit, smaller_s, smaller in (
        (DAY_S, "d", HOUR_S, "h"),
        (HOUR_S, "h", MINUTE_S, "min"),
        (MINUTE_S, "min", 1.0, "s"),
    ):
        whole = round(value / smaller_s)
        if value >= unit_s and whole >= unit_s / smaller_s:
            large, small = divmod(whole, int(unit_s / smaller_s))
            return f"{large:,} {unit} {small:02d} {smaller}"
    if value >= 1:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    return milliseconds(value)


def milliseconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0 ms"
    return f"{digits(1e6 * value)} us" if abs(value) < 1e-3 else f"{digits(1e3 * value)} ms"


def digits(value: float) -> str:
    """Three of them, zeros too, so that a column of times can be compared."""
    places = min(2, max(0, 2 - math.floor(math.log10(abs(value))))) if value else 0
    return f"{value:,.{places}f}"


def megabytes(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{number(value / 1000)} GB" if value >= 1_000 else f"{value:,.0f} MB"


def size_mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2f}" if num_bytes >= 5e3 or not num_bytes else "< 0.01"


def plural(value: int, one: str, more: str | None = None) -> str:
    return f"{value:,} {one if value == 1 else more or one + 's'}"
