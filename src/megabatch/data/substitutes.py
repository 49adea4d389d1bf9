"""What stands in for an image that cannot be read."""

from collections.abc import Callable

from megabatch.data.decode import TooLate, Unreadable
from megabatch.data.encoded import EncodedImages
from megabatch.errors import UserError

MOST_IN_A_ROW = 1000  # unreadable images, after which there is no point in looking for a good one
SKIPPED = -1  # the label of a test image that cannot be read


def load_first(
    images: EncodedImages,
    candidates: range,
    begin: Callable[[int], None],
    load: Callable[[int], None],
    skipped: list[str],
) -> int:
    """Loads the first of the candidates that can be read; its label, or SKIPPED.

    So a batch keeps its size and the others their places, whoever makes it.  Candidates are neighbours in the set:
    mostly of the same class.
    """
    for candidate in candidates:
        sample = candidate % len(images)
        try:
            begin(sample)
            load(sample)
            return int(images.files.labels[sample])
        except Unreadable as error:
            if images.settings.on_error == "raise":
                raise images.complaint(sample, error) from None
            if candidate == candidates.start:
                where = images.files.where(sample, read=not isinstance(error, TooLate))
                skipped.append(f"{where} cannot be read: {error}")
    if len(candidates) > 1:
        raise UserError(f"{skipped[-1]}, and so for {len(candidates)} images in a row; fix the set")
    return SKIPPED
