"""A plain DistributedDataParallel model with `attach` ends with the gradients of one without."""

import contextlib
import gc
import io
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm import attach
from megabatch.comm.cpu.process_group import ProcessGroup
from megabatch.comm.cpu.shared_memory import SharedMemory
from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.errors import UserError
from megabatch.planning.algorithms import ALGORITHMS, ON_REQUEST
from megabatch.planning.plan import CommDtype, error_bound
from megabatch.planning.topology import from_hosts
from megabatch.ranks.world import World
from megabatch.runs.noise import noise_record
from megabatch.torch_api import default_store
from tests.support.hosts import on_hosts
from tests.support.oracle import Oracle
from tests.support.rank_pool import RankPool, RanksFailed

KIB = 1 / 1024  # for bucket_cap_mb: several buckets, rebuilt after the first backward
NUM_STEPS = 4
# Sums of a few numbers near 1, in a different order; in 16 bits, stock DDP rounds at every hop.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Branches(nn.Module):
    """A model that uses one of its layers: a different one on each rank and in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.unused = nn.Linear(6, 6)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.branches[(self.turn + dist.get_rank()) % 4](self.first(x))


class Mixed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 30, dtype=torch.float32), nn.Linear(30, 6, dtype=dtype)
        self.third = nn.Linear(6, 30, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x.float()).to(self.second.weight.dtype)).float())


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


def frozen() -> nn.Module:
    model = layers()
    for name in ("0.bias", "2.weight"):
        model.get_parameter(name).requires_grad = False
    return model


def images() -> nn.Module:
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 2, padding=1), nn.Conv2d(8, 5, 2), nn.Flatten())
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


# The factory of each model and the arguments of DDP; float64 unless the case has other dtypes.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "views": (layers, {"gradient_as_bucket_view": True}),
    "copies": (layers, {"gradient_as_bucket_view": False}),
    "no_sync": (layers, {"gradient_as_bucket_view": True}),
    "zeros": (layers, {"gradient_as_bucket_view": True}),
    "frozen": (frozen, {}),
    "unused": (Branches, {"find_unused_parameters": True}),
    "static_graph": (layers, {"static_graph": True}),
    "channels_last": (images, {"gradient_as_bucket_view": True}),
    "fp16": (layers, {}),
    "bf16": (layers, {"gradient_as_bucket_view": True}),
    "fp32 and fp64": (lambda: Mixed(torch.float64), {}),
    "fp32 and bf16": (lambda: Mixed(torch.bfloat16), {"gradient_as_bucket_view": True}),
    "scalar": (Scalar, {}),
    "one bucket": (layers, {"bucket_cap_mb": 25}),
}


def gradients(case: str, attached: bool, group: Any = None, **settings: Any) -> list[list[torch.Tensor]]:
    """Return the gradients of each step.  They depend only on the case and the rank."""
    torch.manual_seed(0)
    build, options = CASES[case]
    model = build()
    if "and" not in case:
        model.to({"fp16": torch.float16, "bf16": torch.bfloat16}.get(case, torch.float64))
    ddp = DistributedDataParallel(model, process_group=group, **{"bucket_cap_mb": KIB, **options})
    dtype = next(model.parameters()).dtype
    torch.manual_seed(1 + dist.get_rank())
    found = []
    with attach(ddp, **settings) if attached else nullcontext():
        for _ in range(NUM_STEPS):
            for _ in range(2 if case == "no_sync" else 0):
                with ddp.no_sync():
                    ddp(torch.randn(5, 6).to(dtype)).square().mean().backward()
            ddp(torch.randn(5, 6).to(dtype)).square().mean().backward()
            found.append([torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()])
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
            ddp.zero_grad(set_to_none=case != "zeros")
    return found


def require_close(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]], case: str) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        tolerance = max(TOLERANCE.get(gradient.dtype, 0.0) for gradient in theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert our.dtype == their.dtype and our.stride() == their.stride()
            torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case}: {text}")


def compare_with_stock_ddp(world: World, has_shared_memory: bool) -> None:
    kept = SharedMemory.is_supported
    SharedMemory.is_supported = staticmethod(lambda: has_shared_memory)  # type: ignore[method-assign]
    try:
        for case in CASES:
            require_close(gradients(case, attached=True), gradients(case, attached=False), case)
    finally:
        SharedMemory.is_supported = staticmethod(kept)  # type: ignore[method-assign]


def test_gradients_equal_those_of_stock_ddp_in_all_modes(ranks: RankPool) -> None:
    for num_ranks in (1, 3, 4):
        ranks.run(compare_with_stock_ddp, True, num_ranks=num_ranks)


def test_gradients_equal_those_of_stock_ddp_without_shared_memory(ranks: RankPool) -> None:
    ranks.run(compare_with_stock_ddp, False, num_ranks=3)


def compare_on_subgroups(world: World) -> None:
    """Compare in groups of which ranks join different numbers, two of them overlapping."""
    made = {members: dist.new_group(list(members)) for members in [(0, 1), (2, 3), (1, 2, 3)]}
    mine = [group for members, group in made.items() if world.rank in members]
    for settings in ({}, {"algorithm": "flat"}):
        for group in [None, *mine]:
            expected = gradients("views", attached=False, group=group)
            require_close(gradients("views", attached=True, group=group, **settings), expected, "group")


def test_disjoint_and_overlapping_process_groups(ranks: RankPool) -> None:
    ranks.run(compare_on_subgroups, num_ranks=4)


def both_gradients(attached: bool, pair: Any) -> list[list[torch.Tensor]]:
    """Return the gradients of two models, one of all ranks and one of a pair, in one backward."""
    torch.manual_seed(0)
    models = [layers().double(), layers().double()]
    wrapped = [
        DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB)
        for model, group in zip(models, (None, pair), strict=True)
    ]
    torch.manual_seed(1 + dist.get_rank())
    found = []
    with contextlib.ExitStack() as stack:
        for ddp in wrapped if attached else []:
            stack.enter_context(attach(ddp))
        for _ in range(NUM_STEPS):
            x = torch.randn(5, 6).double()
            sum(ddp(x).square().mean() for ddp in wrapped).backward()  # type: ignore[union-attr]
            found.append([p.grad.clone() for model in models for p in model.parameters()])  # type: ignore[union-attr]
            for ddp in wrapped:
                ddp.zero_grad()
    return found


def compare_two_models(world: World) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[world.rank // 2]
    require_close(both_gradients(True, pair), both_gradients(False, pair), "two models")


def test_two_models_at_once(ranks: RankPool) -> None:
    ranks.run(compare_two_models, num_ranks=4)


def opened() -> tuple[int, int, int]:
    """Return the number of threads, file descriptors and shared memory maps of this process."""
    gc.collect()
    maps = sum("/dev/shm/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir())), maps


def attach_and_close(world: World, algorithm: str) -> tuple[tuple[int, int, int], ...]:
    seen = []
    for cycle in range(12):
        model = layers()
        ddp = DistributedDataParallel(model, bucket_cap_mb=KIB)
        gradients = attach(ddp, algorithm=algorithm)
        for _ in range(2):
            ddp(torch.randn(5, 6)).sum().backward()
        gradients.close()
        del gradients, ddp, model
        world.all_reduce(torch.ones(1))
        if cycle in (1, 11):
            seen.append(opened())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megabatch")]
    return tuple(seen)


@pytest.mark.parametrize("algorithm", ["auto", "flat"])
def test_closed_all_reduce_frees_its_resources(ranks: RankPool, algorithm: str) -> None:
    for early, late in ranks.run(attach_and_close, algorithm, num_ranks=2):
        # Less than one per cycle: torch opens and closes files too.
        assert all(after < before + 10 for before, after in zip(early, late, strict=True))
        assert late[2] == 0


def misuse(world: World) -> list[str]:
    said = []
    ddp = DistributedDataParallel(layers())
    with attach(ddp):
        with pytest.raises(RuntimeError, match="can only be called once"):
            attach(ddp)
        ddp(torch.randn(5, 6)).sum().backward()
    for attempt in (
        lambda: ddp(torch.randn(5, 6)).sum().backward(),
        lambda: attach(DistributedDataParallel(layers()), dtype="fp16"),
        lambda: attach(DistributedDataParallel(layers()), dtype="fp8"),  # type: ignore[arg-type]
        lambda: attach(DistributedDataParallel(layers()), algorithm="tree"),
        lambda: attach(DistributedDataParallel(nn.Sequential(nn.Embedding(9, 3, sparse=True)))),
    ):
        with pytest.raises(UserError) as caught:
            attempt()
        said.append(str(caught.value))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megabatch")]
    return said


def test_misuse_raises_an_error_with_a_remedy(ranks: RankPool) -> None:
    for said in ranks.run(misuse, num_ranks=2):
        assert "after its all-reduce was closed" in said[0]
        assert said[1].endswith("nearest: dtype='bf16'")
        assert "'fp8' is not one of" in said[2] and "'tree' is not one of" in said[3]
        assert said[4] == "0 has sparse gradients, but buckets are dense; nearest: sparse=False"


def save_and_load(world: World) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(layers())
    x = torch.randn(5, 6)
    gradients = attach(ddp, algorithm="torus", dtype="bf16")
    assert gradients.plan.name == "torus/bf16"
    with gradients:
        ddp(x).sum().backward()
        content = io.BytesIO()
        torch.save(ddp, content)  # between two backwards
        ddp(x).sum().backward()
        expected = [parameter.grad for parameter in ddp.parameters()]
    content.seek(0)
    loaded = torch.load(content, weights_only=False)
    assert torch.equal(loaded(x), ddp(x))
    loaded.zero_grad()
    with attach(loaded):
        for _ in range(2):
            loaded(x).sum().backward()
    for parameter, gradient in zip(loaded.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_saved_model_can_be_attached_again(ranks: RankPool) -> None:
    """PyTorch's test_DistributedDataParallelCPU does this with every model."""
    ranks.run(save_and_load, num_ranks=2)


# Several nodes on one machine.

HOSTS = {"2+2": "aabb", "2+2 in turn": "abab", "3+1": "aaab", "1+2": "abb", "1+1+1": "abc"}
SETTINGS: list[tuple[torch.dtype, CommDtype]] = [
    (torch.float32, "same"),
    (torch.float32, "bf16"),
    (torch.float32, "fp16"),
    (torch.float64, "same"),
    (torch.float64, "bf16"),
    (torch.bfloat16, "same"),
]
SIZES = ((), (3,), (17, 5), (1000,), (0,), (33, 2))  # of parameters


class Known(nn.Module):
    """A model whose gradients are the tensors that each rank passes in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES)

    def forward(self, brought: list[torch.Tensor]) -> torch.Tensor:
        return sum((w * b).sum() for w, b in zip(self.weights, brought, strict=True))  # type: ignore[return-value]


def brought(rank: int, step: int, dtype: torch.dtype, magnitude: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [(magnitude * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype) for size in SIZES]


def averages(
    world: World, hosts: str, algorithm: str, settings: list[tuple[torch.dtype, CommDtype]], magnitude: float = 1.0
) -> dict[tuple[torch.dtype, CommDtype], list[torch.Tensor]]:
    """Return the averages of each step as one tensor, for each dtype and comm dtype."""
    found: dict[tuple[torch.dtype, CommDtype], list[torch.Tensor]] = {setting: [] for setting in settings}
    with on_hosts(world, hosts):
        for dtype, travels in settings:
            ddp = DistributedDataParallel(Known(dtype), bucket_cap_mb=KIB)
            with attach(ddp, algorithm=algorithm, dtype=travels, loss_is_scaled=True):
                for step in range(3):
                    ddp(brought(world.rank, step, dtype, magnitude)).backward()
                    found[dtype, travels].append(torch.cat([w.grad.flatten() for w in ddp.module.weights]))
                    ddp.zero_grad()
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS | ON_REQUEST)
def test_averages_are_bitwise_identical_and_within_the_error_bound(ranks: RankPool, algorithm: str) -> None:
    for hosts in HOSTS.values():
        topology = from_hosts(hosts)
        plan_of = (ALGORITHMS | ON_REQUEST)[algorithm]
        if plan_of(topology.shape, "same") is None:
            continue
        results = ranks.run(averages, hosts, algorithm, SETTINGS, num_ranks=len(hosts))
        for (dtype, travels), steps in results[0].items():
            plan = plan_of(topology.shape, travels)
            assert plan is not None
            for step, average in enumerate(steps):
                assert all(torch.equal(average, other[dtype, travels][step]) for other in results)
                parts = [
                    torch.cat([part.flatten() for part in brought(rank, step, dtype, 1.0)])
                    for rank in range(len(hosts))
                ]
                own_error = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8}[dtype]
                exact = sum(part.double() for part in parts) / len(hosts)
                magnitudes = sum(part.double().abs() for part in parts) / len(hosts)
                # A 16-bit tensor is rounded in every phase; the average is rounded once more.
                sums_with = own_error if dtype == torch.bfloat16 else max(own_error, 2.0**-24 * (travels != "same"))
                bounds: Any = error_bound(plan, len(hosts) + 3, magnitudes, sums_with)  # type: ignore[arg-type]
                assert ((average.double() - exact).abs() <= bounds).all()
                is_ordered = travels != "same" or dtype == torch.bfloat16
                if is_ordered and algorithm not in ON_REQUEST:  # the all-reduce of Gloo is a ring
                    scaled = [part * (1 / len(hosts)) for part in parts]  # before they are summed, as DDP does
                    assert torch.equal(average, Oracle(plan, topology, scaled).tensors[0])


def test_overflow_in_fp16_is_inf_on_all_ranks(ranks: RankPool) -> None:
    for algorithm in ("flat", "hierarchical", "torus"):
        for found in ranks.run(averages, "aabb", algorithm, SETTINGS[1:3], 1e6, num_ranks=4):
            assert found[torch.float32, "fp16"][0].isinf().any()
            assert found[torch.float32, "bf16"][0].isfinite().all()


def refuse_torus(world: World) -> str:
    with on_hosts(world, HOSTS["3+1"]), pytest.raises(UserError) as caught:
        attach(DistributedDataParallel(layers()), algorithm="torus")
    return str(caught.value)


def test_torus_on_unequal_nodes_is_rejected(ranks: RankPool) -> None:
    said = set(ranks.run(refuse_torus, num_ranks=4))
    assert said == {
        "comm.algorithm='torus' needs nodes with equally many ranks, not 1 and 3; nearest: comm.algorithm=hierarchical"
    }


def many_steps(world: World, hosts: str, algorithm: str) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(8)))
    with on_hosts(world, hosts):
        ddp = DistributedDataParallel(model, bucket_cap_mb=2 * KIB, gradient_as_bucket_view=True)
        with attach(ddp, algorithm=algorithm) as gradients:
            for _ in range(30):
                ddp(torch.ones(2, 24)).sum().backward()
                ddp.zero_grad()
            return len(gradients.layouts.seen)


def test_buckets_overlap_for_many_steps_without_a_deadlock(ranks: RankPool) -> None:
    for hosts, algorithm in (("aabb", "torus"), ("aabb", "hierarchical"), ("aaab", "hierarchical"), ("abb", "flat")):
        assert all(buckets >= 8 for buckets in ranks.run(many_steps, hosts, algorithm, num_ranks=len(hosts)))


# Ranks that fail.


def run_and_catch(
    world: World, gradients: GradientAllReduce, run: Callable[[], None], waits: bool = True
) -> tuple[str, str]:
    """Return the type and text of the error that a rank raises.  Waits until all ranks have raised one."""
    try:
        with gradients:
            run()
        said = ("nothing", "")
    except Exception as error:
        said = type(error).__name__, str(error)
    if waits:
        world.all_reduce(torch.ones(1))
    return said


class Unwell(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.turn, self.rank = layers(), 0, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        if self.turn == 3 and dist.get_rank() == self.rank:
            raise ValueError("this image is broken")
        return self.inner(x)


def raise_in_forward(world: World, hosts: str, algorithm: str) -> tuple[str, str]:
    with on_hosts(world, hosts):
        ddp = DistributedDataParallel(Unwell(1), bucket_cap_mb=KIB)
        gradients = attach(ddp, algorithm=algorithm)

    def run() -> None:
        for _ in range(4):
            ddp(torch.randn(5, 6)).sum().backward()

    return run_and_catch(world, gradients, run)


@pytest.mark.parametrize(
    ("hosts", "algorithm"), [("aaa", "auto"), ("aaa", "flat"), ("aabb", "torus"), ("aabb", "hierarchical")]
)
def test_rank_that_raises_is_named_by_the_others(ranks: RankPool, hosts: str, algorithm: str) -> None:
    """The timeout is ten minutes, so this test would fail if a rank waited for it."""
    said = ranks.run(raise_in_forward, hosts, algorithm, num_ranks=len(hosts))
    assert said.pop(1) == ("ValueError", "this image is broken")
    for kind, text in said:
        assert kind == "MissingRank" and text.startswith("step 2, bucket "), text
        assert "rank 1 has aborted: ValueError: this image is broken" in text, text


def leave_with_an_all_reduce_in_flight(world: World) -> str:
    store = dist.PrefixStore("group", default_store())
    group = ProcessGroup(store, world.rank, range(world.num_ranks), 600.0, world.backend.join, uses_backend=True)
    said = ""
    if world.rank != 1:  # so that no all-reduce can complete
        handle = group.start("scatter", "allreduce", [torch.ones(3)])
        if world.rank == 0:
            group.abort()
        else:
            with pytest.raises(RuntimeError) as caught:
                group.wait(handle)
            said = str(caught.value)
    world.all_reduce(torch.ones(1))
    group.close()
    return said


def test_rank_that_leaves_with_an_all_reduce_in_flight_is_noticed(ranks: RankPool) -> None:
    """Its connections stay open, so only the store can show it; the timeout is ten minutes."""
    assert ranks.run(leave_with_an_all_reduce_in_flight, num_ranks=3) == ["", "", "another rank has aborted"]


def compute_nothing(world: World, algorithm: str) -> tuple[str, str]:
    ddp = DistributedDataParallel(layers(), bucket_cap_mb=KIB)
    gradients = attach(ddp, algorithm=algorithm, timeout_s=3.0)

    def run() -> None:
        for step in range(3):
            out = ddp(torch.randn(5, 6)).sum()
            if step == 2 and world.rank == 1:
                world.all_reduce(torch.ones(1))  # until all others have aborted
            out.backward()
            ddp.zero_grad()

    return run_and_catch(world, gradients, run, waits=world.rank != 1)


@pytest.mark.parametrize("algorithm", ["auto", "flat"])
def test_hanging_rank_is_named_with_its_missing_gradients(ranks: RankPool, algorithm: str) -> None:
    first, hung, third = ranks.run(compute_nothing, algorithm, num_ranks=3)
    for kind, text in (first, third):
        assert kind == "MissingRank"
        assert "rank 1 has reduced 0 buckets of step 2 and has no gradient yet for 0.weight, 0.bias, " in text, text
    assert hung[0] == "MissingRank"


def strides_differ(world: World, hosts: str, algorithm: str) -> tuple[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 2))
    with on_hosts(world, hosts):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        gradients = attach(ddp, algorithm=algorithm)

    def run() -> None:
        if world.rank == 1:
            model[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for _ in range(3):
            ddp(torch.ones(1, 3, 8, 8)).sum().backward()
            ddp.zero_grad()

    return run_and_catch(world, gradients, run)


@pytest.mark.parametrize(("hosts", "algorithm"), [("aa", "auto"), ("aaa", "flat"), ("ab", "torus")])
def test_ranks_with_different_strides_are_named_with_the_parameter(ranks: RankPool, hosts: str, algorithm: str) -> None:
    for kind, text in ranks.run(strides_differ, hosts, algorithm, num_ranks=len(hosts)):
        assert kind == "RankMismatch", text
        assert (
            "; rank 0 has 0.weight [8, 3, 3, 3] of float32 with strides (27, 9, 3, 1), "
            "rank 1 has 0.weight [8, 3, 3, 3] of float32 with strides (27, 1, 9, 3)"
        ) in text, text


def kill_one(world: World) -> None:
    with on_hosts(world, "aab"):
        ddp = DistributedDataParallel(layers(), bucket_cap_mb=KIB)
        gradients = attach(ddp)
    with gradients:
        for step in range(10**9):
            ddp(torch.randn(5, 6)).sum().backward()
            if step == 3 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def test_killed_rank_is_named_on_its_node_and_on_others(ranks: RankPool) -> None:
    """The last test of this file, because the pool must start again."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(kill_one, num_ranks=3)
    said = dict(re.findall(r"^rank (\d):\n(.*?)(?=^rank \d:$|\Z)", str(caught.value), flags=re.MULTILINE | re.DOTALL))
    assert said["1"].strip() == "its process exited without a message"
    assert "MissingRank: step 4, bucket 0: rank 1 has died while the others wait" in said["0"], said["0"]
    assert re.search("MissingRank: step 4, bucket 0: network error: .*; rank 1 does not respond", said["2"]), said["2"]


def noise_of_ranks(world: World, every: int) -> tuple[Any, Any, list[float]]:
    """Return the noise scale by `attach`, the record of the same gradients, and the gradient."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 3, dtype=torch.float64), bucket_cap_mb=KIB / 16)
    gradients = attach(model, noise_every=every)
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank))
    for _ in range(2):  # accumulates a first half, and measures only their sum
        model.zero_grad()
        with model.no_sync():
            model(x[:2]).square().sum().backward()
        model(x[2:]).square().sum().backward()
    plain = nn.Linear(6, 3, dtype=torch.float64)
    plain.load_state_dict(model.module.state_dict())
    plain(x).square().sum().backward()
    parts = [torch.zeros(21, dtype=torch.float64) for _ in range(world.num_ranks)]
    dist.all_gather(parts, torch.cat([p.grad.flatten() for p in plain.parameters()]))  # type: ignore[union-attr]
    parts = [part / world.num_ranks for part in parts]
    squares = float(sum(part.square().sum() for part in parts)), float(torch.stack(parts).sum(0).square().sum())
    found = gradients.noise_scale(5) if every else None
    gradients.close()
    return found, squares, [value for p in model.parameters() for value in p.grad.flatten().tolist()]  # type: ignore[union-attr]


def test_attach_measures_the_noise_between_ranks_and_changes_no_bit(ranks: RankPool) -> None:
    found, squares, gradient = ranks.run(noise_of_ranks, 1, num_ranks=2)[0]
    expected = noise_record(squares[0], squares[1], 2, 5)
    assert (found.signal, found.trace) == pytest.approx((expected.signal, expected.trace), rel=1e-9)
    assert gradient == ranks.run(noise_of_ranks, 0, num_ranks=2)[0][2]
