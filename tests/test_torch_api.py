"""Private names of torch: each exists and works as we expect, and only one file uses them."""

import ast
import copy
import importlib.util
import inspect
import pickle
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch.config.schema import MOST_COMPILED
from tests.support.rank_pool import RankPool

ROOT = Path(__file__).parent.parent
PACKAGE = Path(megabatch.__file__).parent  # also if it was installed from a wheel
MODULE = PACKAGE / "torch_api.py"
# Attributes that start with "_" and are not torch's, in any file.
NOT_OF_TORCH = {
    "_replace": "NamedTuple's",
    "_make": "NamedTuple's",
    "_exit": "of os",
    "_current_frames": "of sys",
    "_getframe": "of sys",
    "_value": "LossScale's own",
    "_im": "of Pillow's images",
}
# Private names of torch that only the benches use.
OF_BENCHES = {
    "lab/megabatch_lab/bench/input.py": {"_iterator", "_shutdown_workers"},  # of a DataLoader, which has no close()
    "lab/megabatch_lab/rehearsal/fake_cuda.py": {  # stands for torch.cuda; torch.accelerator calls these
        "_C",
        "_accelerator_hooks_device_count",
        "_accelerator_setDeviceIndex",
        "_accelerator_exchangeDevice",
        "_accelerator_maybeExchangeDevice",
        "_lazy_init",
        "_host_emptyCache",
        "_cuda_hasPrimaryContext",
        "_exchange_device",
        "_maybe_exchange_device",
    },
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def is_attribute_of_torch(name: str) -> bool:
    owners = (torch, torch._C, Tensor, torch.UntypedStorage, nn.Module, torch.optim.Optimizer, dist, dist.ProcessGroup)
    return is_private(name) and any(hasattr(owner, name) for owner in owners)


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield lines and names: attributes, names looked up by a string, and imports from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.search(r"\btorch[./]_(?!_)", node.value) or is_attribute_of_torch(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield name.lineno, str(name.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                parts = [*module.split("."), *alias.name.split(".")]
                if "torch" in parts[:2] and any(map(is_private, parts)):
                    yield node.lineno, ".".join(parts)


def without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    found = []
    files = [path for folder in (PACKAGE, ROOT / "lab", ROOT / "tools") for path in folder.rglob("*.py")]
    assert MODULE in files and len(files) > 100
    for path in sorted(set(files) - {MODULE}):
        name = path.relative_to(PACKAGE.parent if PACKAGE in path.parents else ROOT).as_posix()
        allowed = NOT_OF_TORCH.keys() | OF_BENCHES.get(name, set())
        tree = without_docstrings(ast.parse(path.read_text()))
        found += [f"{name}:{line} uses {used}" for line, used in private_names(tree) if used not in allowed]
    assert not found, f"move them to megabatch.torch_api: {found}"


def names_of_torch() -> dict[str, str]:
    """Return private names in megabatch.torch_api that can be looked up in a module of torch, with their lines."""
    tree = ast.parse(MODULE.read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *path = ast.unparse(node).split(".")
            name = ".".join([modules.get(root, ""), *path])
            if name.startswith("torch") and any(map(is_private, name.split("."))):
                found[name] = f"{MODULE.name}:{node.lineno}"
    return found


@pytest.mark.parametrize("name", names_of_torch())
def test_torch_has_the_name(name: str) -> None:
    owner: Any = torch
    for part in name.split(".")[1:]:
        assert hasattr(owner, part), f"torch {torch.__version__} has no {name}, which {names_of_torch()[name]} uses"
        owner = getattr(owner, part)


def names_in(*nodes: ast.AST) -> set[str]:
    every = [inner for node in nodes for inner in ast.walk(node)]
    names = {node.id for node in every if isinstance(node, ast.Name)}
    return names | {node.attr for node in every if isinstance(node, ast.Attribute)}


def names_in_tests(path: Path) -> set[str]:
    """Return the names and attributes in a file's tests and in the functions that these pass to ranks."""
    functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    names = names_in(*(node for name, node in functions.items() if name.startswith("test_")))
    return names | names_in(*(node for name, node in functions.items() if name in names))


def test_every_name_has_a_test_here() -> None:
    tree = ast.parse(MODULE.read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in assigned for target in getattr(node, "targets", [getattr(node, "target", None)])]
    names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    names += [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(names) > 30
    tested = names_in_tests(Path(__file__)) | names_in_tests(ROOT / "tests/models/test_torchvision.py")
    tested |= FOREACH.keys() | names_in(ast.parse(COMPILED_LATE))
    assert [name for name in names if name not in tested] == []


@pytest.fixture
def api() -> Any:
    """Import it late: the import fails without one of the names, and then the tests above report it."""
    from megabatch import torch_api

    return torch_api


def three() -> list[Tensor]:
    return [torch.arange(1.0, size + 1) for size in (1, 4, 7)]


FOREACH: dict[str, tuple[tuple[Any, ...], Callable[[Tensor], Tensor]]] = {
    "foreach_add": ((three(),), lambda x: x + x),
    "foreach_add_": ((three(),), lambda x: x + x),
    "foreach_copy_": (([torch.full_like(x, 5.0).double() for x in three()],), lambda x: torch.full_like(x, 5.0)),
    "foreach_mul_": ((3.0,), lambda x: x * 3),
    "foreach_norm": ((), lambda x: x.square().sum().sqrt()),
    "foreach_sub_": (([torch.tensor(2.0)] * 3,), lambda x: x - 2),
    "foreach_zero_": ((), torch.zeros_like),
}


@pytest.mark.parametrize("name", FOREACH)
def test_foreach_matches_the_plain_operation_on_each_tensor(api: Any, name: str) -> None:
    tensors = three()
    arguments, plain = FOREACH[name]
    result = getattr(api, name)(tensors, *arguments)
    changed = tensors if name.endswith("_") else result
    for found, before in zip(changed, three(), strict=True):
        torch.testing.assert_close(found, plain(before))
    if not name.endswith("_"):
        assert all(map(torch.equal, tensors, three()))


def test_foreach_lerp_accepts_a_weight_per_tensor(api: Any) -> None:
    moved, ends = three(), [torch.zeros_like(tensor) for tensor in three()]
    api.foreach_lerp_(moved, ends, [0.0, 1.0, 0.5])
    assert all(torch.equal(found, x * share) for found, x, share in zip(moved, three(), (1.0, 0.0, 0.5), strict=True))


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_fused_sgd_is_momentum_sgd_with_dampening_and_skips_on_found_inf(api: Any, found_inf: float | None) -> None:
    weights, gradients, buffers = three(), [x.flip(0) for x in three()], [2 * x for x in three()]
    api.fused_sgd_(
        weights,
        gradients,
        buffers,
        weight_decay=0.5,
        momentum=0.75,
        lr=0.25,
        dampening=0.5,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=None if found_inf is None else torch.tensor(found_inf),
    )
    for w, v, x in zip(weights, buffers, three(), strict=True):
        expected = x, 2 * x
        if not found_inf:
            buffer = 0.75 * 2 * x + 0.5 * (x.flip(0) + 0.5 * x)
            expected = x - 0.25 * buffer, buffer
        torch.testing.assert_close((w, v), expected)


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_fused_adamw_moves_by_the_learning_rate_at_first_and_skips_on_found_inf(
    api: Any, found_inf: float | None
) -> None:
    """The first step is lr g / |g|, after the decay."""
    weights, gradients, averages, squares = three(), [-x for x in three()], *([0 * x for x in three()] for _ in "12")
    steps = [torch.ones(()) for _ in weights]
    settings: dict[str, Any] = {"lr": 0.25, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.5, "eps": 0.0}
    settings |= {
        "amsgrad": False,
        "maximize": False,
        "found_inf": found_inf if found_inf is None else torch.tensor(found_inf),
    }
    api.fused_adamw_(weights, gradients, averages, squares, [], steps, **settings)
    for w, average, x in zip(weights, averages, three(), strict=True):
        expected = (x, 0 * x) if found_inf else (x - 0.25 * 0.5 * x + 0.25, -0.5 * x)
        torch.testing.assert_close((w, average), expected)


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_unscale_multiplies_and_detects_inf_and_nan(api: Any, bad: float | None) -> None:
    gradients, found = three(), torch.zeros(())
    if bad is not None:
        gradients[1][2] = bad
    api.unscale_and_find_inf_(gradients, found, torch.tensor(0.5))
    assert found.item() == (bad is not None)
    assert torch.equal(gradients[2], 0.5 * three()[2])


def test_update_scale_halves_after_an_overflow_and_doubles_after_an_interval(api: Any) -> None:
    scale, clean_steps = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    seen = []
    for overflowed in (0.0, 1.0, 0.0, 0.0, 0.0):
        api.update_scale_(scale, clean_steps, torch.tensor(overflowed), 2.0, 0.5, 3)
        seen.append((scale.item(), clean_steps.item()))
    assert seen == [(1024, 1), (512, 0), (512, 1), (512, 2), (1024, 0)]


def test_tensors_are_grouped_by_dtype_and_lists_stay_together(api: Any) -> None:
    weights = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(4)]
    groups = api.group_by_device_and_dtype([weights, [2 * weight for weight in weights]])
    found = [[[len(tensor) for tensor in each] for each in tensors] for tensors, _ in groups.values()]
    assert sorted(found) == [[[2, 4], [2, 4]], [[3], [3]]]


def test_resize_writes_what_interpolate_returns(api: Any) -> None:
    image = (
        torch.arange(3 * 40 * 30, dtype=torch.uint8).view(1, 3, 40, 30).contiguous(memory_format=torch.channels_last)
    )
    out = torch.empty(1, 3, 7, 9, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    api.resize_antialiased(image, (7, 9), False, None, None, out=out)
    assert torch.equal(out, F.interpolate(image, (7, 9), mode="bilinear", antialias=True))


def test_norm_base_is_every_layer_with_running_statistics(api: Any) -> None:
    batch_norms = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()]
    instance_norms = [nn.InstanceNorm1d(2), nn.InstanceNorm2d(2), nn.InstanceNorm3d(2)]
    others = [nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.RMSNorm(2), nn.LocalResponseNorm(2)]
    assert all(isinstance(layer, api.NormBase) for layer in batch_norms + instance_norms)
    assert all(isinstance(layer, api.BatchNormBase) for layer in batch_norms)
    assert not any(isinstance(layer, api.BatchNormBase) for layer in instance_norms + others)
    assert not any(isinstance(layer, api.NormBase) for layer in others)


def test_a_refused_view_is_recognised(api: Any) -> None:
    images = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError) as refusal:
        images.view(len(images), -1)
    assert api.is_refused_view(refusal.value) and not api.is_refused_view(RuntimeError("a view"))


def test_an_operation_without_a_deterministic_implementation_is_named(api: Any) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as refusal:
            nn.MaxUnpool1d(2)(torch.ones(1, 1, 2), torch.tensor([[[0, 2]]]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert api.nondeterministic_operation(refusal.value) == "max_unpooling2d_forward_out"
    assert api.nondeterministic_operation(RuntimeError("other")) is None


def test_a_name_that_a_pickle_may_not_import_is_found(api: Any, tmp_path: Path) -> None:
    torch.save({"state": Path("x")}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError) as refusal:
        torch.load(tmp_path / "file.pt", weights_only=True)
    assert api.refused_global(refusal.value).startswith("pathlib.")
    assert api.refused_global(pickle.UnpicklingError("damaged")) is None


def test_fake_tensors_use_no_memory_and_support_autocast(api: Any) -> None:
    with api.FakeTensorMode():
        images = torch.empty(1 << 24, 1 << 12)  # 256 GiB
        with torch.autocast("cpu", torch.bfloat16):
            assert nn.Linear(1 << 12, 10)(images).dtype == torch.bfloat16


def test_an_error_on_fake_tensors_is_logged_unless_silent(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with api.FakeTensorMode(), pytest.raises(RuntimeError, match="Output size is too small"):
            nn.MaxPool2d(3)(torch.empty(1, 1, 2, 2))

    api.fake_tensor.log.addHandler(caplog.handler)
    try:
        with api.silent_fake_tensors():
            fail()
        assert not caplog.records
        fail()
        assert caplog.records
    finally:
        api.fake_tensor.log.removeHandler(caplog.handler)


def test_every_storage_has_a_unique_id(api: Any) -> None:
    tensor = torch.ones(4)
    assert api.storage_id(tensor[1:].untyped_storage()) == api.storage_id(tensor.untyped_storage())
    others = [torch.ones(4).untyped_storage(), torch.ones(0).untyped_storage(), torch.ones(0).untyped_storage()]
    with api.FakeTensorMode():
        others += [torch.ones(4).untyped_storage(), torch.ones(4).untyped_storage()]
    assert len({api.storage_id(storage) for storage in others}) == len(others)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_shared_memory_is_mapped_by_its_descriptor(api: Any) -> None:
    tensor = torch.arange(100.0)
    descriptor, num_bytes = api.share_by_descriptor(tensor.untyped_storage())
    assert num_bytes >= 400
    mapped = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", True, num_bytes)
    other = torch.empty(0).set_(mapped, 0, (100,), (1,))  # type: ignore[arg-type]
    assert torch.equal(other, torch.arange(100.0))
    other[7] = -1
    assert tensor[7] == -1


def test_a_queued_callback_runs_after_all_gradients_are_computed(api: Any) -> None:
    first, last = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    seen: list[bool] = []
    last.register_hook(lambda _: api.queue_callback(lambda: seen.append(first.grad is not None)))
    (first.exp() * last).sum().backward()
    assert seen == [True]


@pytest.fixture
def alone() -> Iterator[None]:
    """Connect one rank in this process; deprecation warnings of torch are errors."""
    from megabatch.ranks.discover import RankInfo
    from megabatch.ranks.world import connect

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        with connect(RankInfo(0, 1, 0, 1), "cpu"):
            yield


@pytest.mark.usefixtures("alone")
def test_the_default_store_is_shared_by_all_ranks(api: Any) -> None:
    api.default_store().set("key", "value")
    assert api.default_store().get("key").endswith(b"value")


@pytest.mark.usefixtures("alone")
def test_aborted_process_groups_are_gone(api: Any) -> None:
    assert dist.is_initialized()
    api.abort_process_groups()
    assert not dist.is_initialized()


def test_nccl_watchdog_sets_the_key_that_we_delete(api: Any) -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert f'kStoreDumpKey = "{api.NCCL_DUMP_KEY}"' in header.read_text()


def test_the_default_group_has_the_same_implementation_as_the_others(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that registers a backend is its entry point.  The name exists since torch 2.14."""
    function, registered = "_register_builtin_nccl_legacy_backend", entry_points(group="torch.distributed.backends")
    is_named = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    assert {point.attr for point in registered if point.name == "nccl-legacy"} == ({function} if is_named else set())
    assert api.nccl_backend() == ("nccl-legacy" if is_named else "nccl")
    if is_named:  # a creator that ignores TORCH_DIST_USE_NCCL2
        assert "_create_nccl_process_group," in inspect.getsource(getattr(distributed_c10d, function))
    monkeypatch.setattr(distributed_c10d, function, object, raising=False)
    assert api.nccl_backend() == "nccl-legacy"
    monkeypatch.delattr(distributed_c10d, function)
    assert api.nccl_backend() == "nccl"


@pytest.mark.usefixtures("alone")
def test_class_of_the_default_backend_is_that_of_the_device(api: Any) -> None:
    assert api.default_backend_class(torch.device("cpu")) == "ProcessGroupGloo"


def gather_own(world: Any) -> list[float]:
    from megabatch.torch_api import all_gather_single

    gathered = torch.zeros(2 * world.num_ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_gather_single(gathered, torch.tensor([world.rank, 0.5]), group=None)
    return gathered.tolist()


def test_all_gather_single_fills_one_tensor_without_a_warning(ranks: RankPool) -> None:
    assert ranks.run(gather_own, num_ranks=2) == 2 * [[0, 0.5, 1, 0.5]]


def test_process_groups_have_the_collectives_that_our_plans_use(api: Any) -> None:
    """Use a group of two members, which are threads."""
    store, results = dist.HashStore(), {}

    def take_part(index: int) -> None:
        group = dist.ProcessGroupGloo(store, index, 2, timedelta(seconds=60))
        gathered, own = torch.zeros(4), torch.zeros(2)
        getattr(group, api.ALL_GATHER)(gathered, torch.full((2,), index + 1.0)).wait()
        getattr(group, api.REDUCE_SCATTER)(own, torch.arange(4.0)).wait()
        arrived = torch.zeros(2 * (index + 1))
        sent = torch.arange(3.0) + 10 * index
        getattr(group, api.ALL_TO_ALL)(arrived, sent, [index + 1] * 2, [1, 2]).wait()
        results[index] = gathered.tolist(), own.tolist(), arrived.tolist()

    threads = [threading.Thread(target=take_part, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {
        0: ([1, 1, 2, 2], [0, 2], [0, 10]),
        1: ([1, 1, 2, 2], [4, 6], [1, 2, 11, 12]),
    }


class Steps(torch.optim.Optimizer):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__([parameter], {})
        self.seen: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(float(getattr(self, "found_inf", -1.0)))


def test_a_grad_scaler_passes_found_inf_to_an_optimizer_that_handles_it(api: Any) -> None:
    fused, plain = (torch.optim.SGD([nn.Parameter(torch.ones(2))], fused=fused) for fused in (True, False))
    assert api.supports_found_inf(fused) and not api.supports_found_inf(plain)
    for promises in (False, True):
        parameter = nn.Parameter(torch.ones(2))
        optimizer, scaler = Steps(parameter), torch.amp.GradScaler("cpu")
        if promises:
            api.declare_found_inf_support(optimizer)
        assert vars(optimizer).get(api.SUPPORTS_FOUND_INF, False) == promises
        scaler.scale((parameter * torch.inf).sum()).backward()
        scaler.step(optimizer)
        assert optimizer.seen == ([1.0] if promises else [])  # without the promise it skips the step


def test_forward_hooks_can_be_removed_from_a_copy(api: Any) -> None:
    module, calls = nn.Identity(), []
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    plain = copy.deepcopy(module)
    for hooks in api.forward_hooks(plain):
        assert len(hooks) == 1
        hooks.clear()
    plain(torch.ones(1))
    assert calls == []
    module(torch.ones(1))
    assert calls == ["before", "after"]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_nccl_groups_accept_a_timeout_and_report_whether_they_split(api: Any) -> None:
    assert hasattr(dist.ProcessGroupNCCL, "supports_splitting")
    assert api.nccl_options(timedelta(seconds=7))._timeout == timedelta(seconds=7)


def test_collectives_of_nccl_have_high_priority(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    if not dist.is_nccl_available():  # a CPU build has no such class
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    assert api.nccl_options(timedelta(seconds=7)).is_high_priority_stream is True


def test_nccl_options_still_have_a_priority_and_a_group_to_split_from() -> None:
    header = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    assert "explicit Options(bool is_high_priority_stream = false)" in header
    assert "ProcessGroupNCCL> split_from;" in header and "int split_color" in header
    assert "void eagerConnectSingleDevice(at::Device device)" in header
    assert "void performNocolorSplit(at::Device device)" in header


def test_communicators_are_split_only_from_a_bound_group_of_the_same_implementation(
    monkeypatch: pytest.MonkeyPatch, api: Any
) -> None:
    class ProcessGroupNCCL(SimpleNamespace):
        supports_splitting = True

    def group(bound: torch.device | None, backend: Any) -> Any:
        return SimpleNamespace(bound_device_id=bound, _get_backend={device: backend}.get)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    device, ours, other = torch.device("cuda", 3), ProcessGroupNCCL(), SimpleNamespace(supports_splitting=True)
    assert api.nccl_to_split(group(device, ours), device) is ours
    assert api.nccl_to_split(group(device, other), device) is None  # the group of a script on torch 2.15
    assert api.nccl_to_split(group(None, ours), device) is None  # a script without device_id


def test_a_communicator_is_split_with_a_color_and_connected_at_once(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    """Only the calls can be compared without a GPU; a build with NCCL has the names."""
    calls: list[Any] = []

    class ProcessGroupNCCL:
        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            *given, options = arguments
            calls.append((given, options.split_from, options.split_color, options._timeout))

        def eager_connect_single_device(self, device: torch.device) -> None:
            calls.append(("connect", device))

        def perform_nocolor_split(self, device: torch.device) -> None:
            calls.append(("leave", device))

    if dist.is_nccl_available():
        assert {"eager_connect_single_device", "perform_nocolor_split"} <= {*dir(dist.ProcessGroupNCCL)}
        assert {"split_from", "split_color"} <= {*dir(dist.ProcessGroupNCCL.Options)}
    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    device, whole, store, timeout = torch.device("cuda", 3), object(), object(), timedelta(seconds=7)
    group = api.split_nccl_group(whole, 5, device, store, 1, 4, timeout)
    api.leave_nccl_split(group, device)
    assert calls == [([store, 1, 4], whole, 5, timeout), ("connect", device), ("leave", device)]


@pytest.mark.usefixtures("alone")
def test_process_groups_have_a_bound_device_and_backends() -> None:
    whole: Any = dist.group.WORLD
    assert whole.bound_device_id is None
    assert isinstance(whole._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)


@pytest.mark.usefixtures("alone")
def test_ddp_calls_our_logger_instead_of_recording_times(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(api.NoRuntimeStatistics, "set_runtime_stats_and_log", lambda self: calls.append(self))
    model = DistributedDataParallel(nn.Linear(2, 2))
    api.stop_runtime_statistics(model)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 2
    model.logger.set_error_and_log("other calls reach torch's logger")  # type: ignore[union-attr]


def buffers_after_forward(world: Any, keeps: bool) -> list[float]:
    from megabatch.torch_api import disable_buffer_broadcast

    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(2, momentum=0.0), nn.Linear(2, 2)))
    if keeps:
        disable_buffer_broadcast(model)
    model.module[0].running_mean.fill_(float(world.rank))  # type: ignore[operator, union-attr]
    model(torch.ones(2, 2)).sum().backward()
    model(torch.ones(2, 2)).sum().backward()
    mean: list[float] = model.module[0].running_mean.tolist()  # type: ignore[operator, union-attr]
    return mean


def test_ddp_does_not_broadcast_buffers_if_disabled(ranks: RankPool) -> None:
    assert ranks.run(buffers_after_forward, False, num_ranks=2) == [[0, 0], [0, 0]]
    assert ranks.run(buffers_after_forward, True, num_ranks=2) == [[0, 0], [1, 1]]


@pytest.mark.usefixtures("alone")
def test_bucket_caps_are_those_passed_to_ddp(api: Any) -> None:
    assert api.bucket_caps_bytes(DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=3)) == [3 << 20]
    given: Any = [1, 0.5, 2]
    assert api.bucket_caps_bytes(DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb_list=given)) == [
        1 << 20,
        1 << 19,
        2 << 20,
    ]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("cut_mib", "num_graphs"), [(1, 3), (100, 2)])
def test_a_compiled_graph_is_split_at_the_given_size(api: Any, cut_mib: int, num_graphs: int) -> None:
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    network = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))  # 1.4 MB each; the first cut is at 1 MiB or less
    model = DistributedDataParallel(network)
    api.split_compiled_graphs(model, cut_mib << 20)
    network.forward = torch.compile(network.forward, backend=count)  # type: ignore[method-assign]
    model(torch.ones(2, 600)).sum().backward()
    assert len(graphs) == num_graphs


def test_errors_of_torch_compile_are_recognised(api: Any) -> None:
    assert all(importlib.util.find_spec(module) for module in api.COMPILER_MODULES)
    exceptions = importlib.import_module("torch._inductor.exc")
    assert all(issubclass(getattr(exceptions, name), Exception) for name in (api.NO_CXX, api.NO_TRITON))

    files: list[str] = []

    def note_stack(graph: Any, _: Any) -> Any:
        files.extend(frame.filename for frame in traceback.extract_stack())
        raise ValueError("refused")

    with pytest.raises(Exception, match="refused") as refusal:
        torch.compile(lambda x: x + 1, backend=note_stack)(torch.ones(1))
    assert refusal.type.__module__.startswith(api.COMPILER_MODULES)
    assert any(file.endswith(api.COMPILER_FILE) for file in files)


def test_memory_is_pinned_in_place_as_a_whole(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal copies from such memory; without a GPU only the calls can be compared."""
    calls, launched = list[tuple[int, ...]](), list[tuple[int, str]]()

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append((address, size, flags))
            return 0 if len(calls) == 1 else 2  # cudaErrorMemoryAllocation

        def cudaHostUnregister(self, address: int) -> int:
            calls.append((address,))
            return 0

    runtime = getattr(torch.cuda, "_cudart", None)
    assert runtime is None or {"cudaHostRegister", "cudaHostUnregister"} <= {*dir(runtime)}
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "ones", lambda count, device: launched.append((count, device)))
    memory = torch.empty(10, 3, 4, 4, dtype=torch.uint8)
    assert api.pin_in_place(memory) and not api.pin_in_place(memory)
    api.unpin(memory)
    assert calls == [(memory.data_ptr(), 480, 0)] * 2 + [(memory.data_ptr(),)]
    assert launched == [(1, "cuda")]  # after the error, which it clears


def test_context_is_looked_up_in_torch(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    assert torch.version.cuda is None or hasattr(torch._C, "_cuda_hasPrimaryContext")
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 3, raising=False)
    assert [api.has_context(index) for index in (0, 3)] == [False, True]


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_either_extension_of_a_cpu_multiplies_bf16(
    monkeypatch: pytest.MonkeyPatch, api: Any, avx512: bool, amx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert api.multiplies_bf16() == (avx512 or amx)


COMPILED_LATE = """
import sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from megabatch.torch_api import EXCLUDED, CompilerPart, import_compiler, postpone_compiler

postpone_compiler()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
print(isinstance(torch._dynamo, CompilerPart), len(EXCLUDED) > 0)
compiled = torch.compile(lambda x: x + 1, backend="eager")
print(compiled(torch.zeros(1)).item(), hasattr(torch.optim.Optimizer.zero_grad.__wrapped__, "__dynamo_disable"))
config = import_compiler("torch._dynamo.config")
print(len(EXCLUDED), config.recompile_limit, sys.modules["torch._dynamo"] is torch._dynamo)
"""


@pytest.mark.ranks  # starts a process
def test_the_compiler_is_imported_when_it_is_used() -> None:
    # In a new process, which has not imported it.
    done = subprocess.run([sys.executable, "-c", COMPILED_LATE], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["True", "True", "1.0", "False", "0", str(MOST_COMPILED), "True"], done.stderr
