from collections.abc import Iterator

import pytest
from megabatch_lab.rehearsal import device_decoder, fake_cuda

from megabatch.data.pipeline.device_decoder import DECODERS
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


@pytest.fixture(autouse=True)
def stand_in_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the decoder that ranks have to this process, which loads their configs."""
    monkeypatch.setitem(DECODERS, device_decoder.NAME, device_decoder.decode_like_cpu)
