"""The style of matplotlib plots: SVG on white, with text as text, and reproducible bytes.

The colours are those of Okabe and Ito 2008, which colour-blind readers can distinguish.  Grey replaces yellow, which is
faint on white.
"""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megabatch.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")
DASHES = ("-", "--", ":")  # for more arms than colours
GREY, INK = "#767676", "#222222"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megabatch",
    "font.family": ["DejaVu Sans", "sans-serif"],  # matplotlib includes the first and measures text with it
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a $
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
MOST_DETAILED = 1e4  # largest ratio of a logarithmic axis with ticks between powers of ten
LABEL_INCHES = 0.165  # from one line of text to the next


def require_matplotlib() -> None:
    """Raise UserError if matplotlib is missing.  Call this first: a study draws its plots hours later."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("plots need matplotlib, which is not installed; pip install 'megabatch[studies]'") from None


def to_svg(draw: Callable[["Figure"], None]) -> str:
    """Return what `draw` paints on an empty figure as SVG, independent of the user's matplotlib settings."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(layout="constrained")
        draw(figure)
        # No date and no version of matplotlib.
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue().decode()


def color_of(index: int) -> str:
    return COLORS[index % len(COLORS)]


def dash_of(index: int) -> str:
    return DASHES[index // len(COLORS) % len(DASHES)]


def mark_log_ticks(axis: "Axis", low: float, high: float) -> None:
    """Set ticks at 1, 2, 5, 10, or over many decades at 1, 10, 100, without exponents."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    steps = (1.0, 2.0, 5.0) if high <= low * MOST_DETAILED else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=99))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def label_ends(axes: "Axes", ends: Sequence[tuple[float, float, str, str]], height_inches: float) -> None:
    """Label lines at the right edge, with a leader from each end: x, y, name, color."""
    to_axes = axes.transScale + axes.transLimits
    points = [to_axes.transform((x, y)) for x, y, _, _ in ends]
    heights = [min(max(float(point[1]), 0.0), 1.0) for point in points]
    places = spread_apart(heights, LABEL_INCHES / height_inches)
    for point, height, place, (_, _, name, color) in zip(points, heights, places, ends, strict=True):
        along = [float(point[0]), 1.005, 1.04, 1.055]
        leader = [height, height, place, place]
        axes.plot(along, leader, color=color, lw=0.7, alpha=0.7, transform=axes.transAxes, clip_on=False)
        axes.text(1.065, place, name, va="center", transform=axes.transAxes)


def spread_apart(heights: Sequence[float], distance: float) -> list[float]:
    """Move heights between 0 and 1 to be at least `distance` apart, in the same order.

    Heights that are too close form a block around their mean, which absorbs the blocks that it touches.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    blocks: list[list[int]] = []

    def first_place(block: list[int]) -> float:
        length = (len(block) - 1) * distance
        middle = sum(heights[index] for index in block) / len(block)
        return max(0.0, min(middle - length / 2, 1 - length))

    for index in order:
        blocks.append([index])
        while len(blocks) > 1 and first_place(blocks[-2]) + len(blocks[-2]) * distance > first_place(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    places = list(heights)
    for block in blocks:
        for step, index in enumerate(block):
            places[index] = first_place(block) + step * distance
    return places
