import importlib
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch

from tests.support.rank_pool import RankPool
from tests.support.skips import count_reasons, read_allowed

hypothesis.settings.register_profile("untimed", deadline=None)  # no test asserts a wall-clock time
hypothesis.settings.load_profile("untimed")


# Shells start background jobs with SIGINT ignored, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
# The tier of a test follows from its folder, unless the test or its module has a marker of another tier.
FAST = {
    "comm",
    "config",
    "data",
    "experiments",
    "models",
    "optim",
    "planning",
    "precision",
    "preflight",
    "ranks",
    "report",
    "runs",
    "simulate",
}
LAB = {"lab", "rehearsal"}
TIERS = ("fast", "ranks", "lab")


def tier_of(path: Path) -> str:
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    if folder in LAB:
        return "lab"
    return "fast" if folder in FAST or folder.endswith(".py") else "ranks"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(tier) for tier in TIERS):
            continue
        tier = tier_of(item.path)
        needs_ranks = tier == "fast" and "ranks" in getattr(item, "fixturenames", ())
        item.add_marker("ranks" if needs_ranks else tier)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="device of the ranks")
    parser.addoption("--allowed-skips", type=Path, help="fail if a test is skipped for a reason not in this file")


def skipped(config: pytest.Config) -> Counter[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return count_reasons(reporter.stats.get("skipped", [])) if reporter else Counter()


def unexpected_skips(config: pytest.Config) -> list[str]:
    allowed = config.getoption("--allowed-skips")
    return sorted(skipped(config).keys() - read_allowed(allowed)) if allowed else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")  # pytest-xdist
    if not is_worker and session.exitstatus == pytest.ExitCode.OK and unexpected_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = skipped(config)
    if reasons:
        terminalreporter.section("skipped tests by reason")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")
    for reason in unexpected_skips(config):
        allowed = config.getoption("--allowed-skips")
        terminalreporter.write_line(f"ERROR: tests skipped for a reason that is not in {allowed}: {reason}", red=True)


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
    """Use one thread in every test: with busy ranks on the same cores, two threads are ten times slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the indexes of test folders out of the user's cache."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    from megabatch.torch_api import allow_torchvision_without_extension

    allow_torchvision_without_extension()
    return importlib.import_module("torchvision")
