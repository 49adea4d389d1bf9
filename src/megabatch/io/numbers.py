"""Format numbers for terminals and pages, with separators, units and a sensible number of digits."""

import math

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
MISSING = "-"


def count(value: float | None) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def number(value: float | None, digits: int = 4) -> str:
    """Return `digits` significant digits without trailing zeros; very large and small values have an exponent."""
    if value is None:
        return MISSING
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
    """Return a share of 1 in percent. A small share above 0 is never shown as 0 %."""
    if share is None or not math.isfinite(share):
        return MISSING
    least = 10.0**-places
    if 0 < 100 * share < least / 2:
        return f"< {least:g} %"
    return f"{100 * share:,.{places}f} %"


def accuracy(share: float | None) -> str:
    """Return a top-1 or top-5 as it is usually quoted: 76.31 %."""
    return percent(share, 2) if share is None or share > 0 else "0.00 %"


def duration(value: float | None) -> str:
    """Return a duration in its two largest units: 1 h 05 min, 2 min 10 s, 12.3 s, 4.56 ms."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0:
        return f"-{duration(-value)}"
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
        return MISSING
    if value == 0:
        return "0 ms"
    return f"{three_digits(1e6 * value)} us" if abs(value) < 1e-3 else f"{in_ms(value)} ms"


def in_ms(value_s: float) -> str:
    """Return seconds in milliseconds, for a column whose header has the unit."""
    return three_digits(1e3 * value_s)


def three_digits(value: float | None) -> str:
    """Return about three digits, trailing zeros included: 0.042, 0.421, 7.31, 48.2, 1,204."""
    if value is None:
        return MISSING
    places = next((places for places, bound in enumerate((100, 10, 1, 0.1)) if abs(value) >= bound), 3)
    return f"{value:,.{places}f}" if value else "0"


def megabytes(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{number(value / 1000)} GB" if value >= 1_000 else f"{value:,.0f} MB"


def in_mb(num_bytes: float) -> str:
    """Return bytes in MB, for a column whose header has the unit."""
    return f"{num_bytes / 1e6:,.2f}" if num_bytes >= 5e3 or not num_bytes else "< 0.01"


def plural(value: int, one: str, more: str | None = None) -> str:
    """Return a count and its noun: 1 rank, 1,024 ranks."""
    return f"{value:,} {one if value == 1 else more or one + 's'}"
