from collections.abc import Iterator
from types import ModuleType

import hypothesis
import pytest
import torch

from tests.support.rank_pool import RankPool

hypothesis.settings.register_profile("untimed", deadline=None)  # no test asserts a wall-clock time
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the laws are tested")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--device"))


@pytest.fixture(scope="session")
def ranks(device: str) -> Iterator[RankPool]:
    pool = RankPool(size=torch.cuda.device_count() if device == "cuda" else 4, device=device)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Before every test: a run takes its share of the cores, and two threads beside busy ranks are ten times slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes of test folders do not go to the user's cache."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    from megabatch.torch_api import allow_torchvision_without_extension

    allow_torchvision_without_extension()
    module: ModuleType = pytest.importorskip("torchvision", reason="needs torchvision")
    return module
