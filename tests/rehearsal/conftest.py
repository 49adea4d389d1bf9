from collections.abc import Iterator

import pytest
from megabatch_lab.rehearsal import fake_cuda

from tests.support import rehearsals
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks on the fake CUDA."""
    reason = fake_cuda.why_not()
    if reason:
        pytest.skip(reason)
    fake_cuda.build()  # not within the time limit of a test
    pool = RankPool(size=4, device="cuda", starts=rehearsals.start)
    yield pool
    pool.close()
