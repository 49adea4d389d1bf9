"""Every format that is read from files of others."""

from megabatch.fuzz.archives import ARCHIVES
from megabatch.fuzz.arrays import ARRAYS
from megabatch.fuzz.formats import Format
from megabatch.fuzz.images import IMAGES
from megabatch.fuzz.texts import TEXTS
from megabatch.fuzz.trained import RUNS

FORMATS: dict[str, Format] = IMAGES | ARCHIVES | ARRAYS | TEXTS | RUNS
