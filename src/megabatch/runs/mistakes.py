"""mistakes.json: what the newest evaluation of a run took for what, with pictures of a few test images."""

from typing import Annotated

from msgspec import Meta, Struct, field

from megabatch.runs.records import Count, Share

MOST_CONFUSIONS = 10_000  # pairs of classes that are kept, the most frequent ones
MOST_CLASSES = 1_000  # beyond that, pairs are not counted: their matrix would be all-reduced


class Confusion(Struct, frozen=True, array_like=True):
    """So many images of one class were taken for another."""

    label: Count
    predicted: Count
    count: Count


class Example(Struct, frozen=True, kw_only=True):
    """A test image that was taken for another class."""

    sample: Count  # its number among the test images
    label: Count
    predicted: Count
    confidence: Share  # softmax of the class that it was taken for
    picture: Annotated[str, Meta(max_length=1 << 20)]  # a small PNG or JPEG, in base64


class Mistakes(Struct, frozen=True, kw_only=True):
    step: Count = 0  # after which it was evaluated
    class_counts: list[Count]  # test images of each class
    confusions: list[Confusion] | None  # the most frequent first; None: too many classes
    examples: list[Example] = field(default_factory=list)  # the most confident first; [] with train.examples=0
