from collections.abc import Iterator

import pytest
import torch

from tests.ranks import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the laws are tested")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that need ranks go to the one xdist worker that holds the pool."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--device"))


@pytest.fixture(scope="session")
def ranks(device: str) -> Iterator[RankPool]:
    pool = RankPool(size=torch.cuda.device_count() if device == "cuda" else 4, device=device)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes of test folders do not go to the user's cache."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
