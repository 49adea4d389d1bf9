import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import GradBucket, HashStore, _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel

from megabatch.planning.buckets import ddp_buckets, ddp_caps, fuse
from megabatch.planning.pipeline import Gradient, GradientDtype

DTYPES: dict[GradientDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
thresholds = st.integers(1, 400)


def gradients_of(dtypes: list[GradientDtype]) -> st.SearchStrategy[list[Gradient]]:
    def bytes_of(num_elements: int, dtype: GradientDtype) -> Gradient:
        return Gradient(num_elements * DTYPES[dtype].itemsize, dtype)

    return st.lists(st.builds(bytes_of, st.integers(1, 60), st.sampled_from(dtypes)), min_size=1, max_size=40)


def assigned_by_torch(gradients: list[Gradient], caps_bytes: list[int]) -> list[list[int]]:
    tensors = [torch.empty(num_bytes // DTYPES[dtype].itemsize, dtype=DTYPES[dtype]) for num_bytes, dtype in gradients]
    buckets, _ = _compute_bucket_assignment_by_size(tensors, caps_bytes, [False] * len(tensors))
    return buckets


def caps_in_bytes(caps: list[float] | None) -> list[int]:
    assert caps
    return [int(cap * 1024 * 1024) for cap in caps]  # as DistributedDataParallel does


@given(gradients=gradients_of(["fp32", "bf16"]), threshold=thresholds)
def test_fuse_fills_one_bucket_per_dtype_up_to_the_limit(gradients: list[Gradient], threshold: int) -> None:
    buckets = fuse(gradients, threshold)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(gradients)))
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)
    for dtype in DTYPES:
        of_dtype = [bucket for bucket in buckets if gradients[bucket[0]].dtype == dtype]
        in_order = [index for index, gradient in enumerate(gradients) if gradient.dtype == dtype]
        assert [index for bucket in of_dtype for index in bucket] == in_order
        sizes = [sum(gradients[index].num_bytes for index in bucket) for bucket in of_dtype]
        assert all(size <= threshold or len(bucket) == 1 for size, bucket in zip(sizes, of_dtype, strict=True))
        following = [gradients[bucket[0]].num_bytes for bucket in of_dtype[1:]]
        assert all(size + first > threshold for size, first in zip(sizes, following, strict=False))


def test_a_gradient_above_the_threshold_has_a_bucket_to_itself() -> None:
    sizes = [10, 20, 500, 30, 40, 50]
    assert fuse([Gradient(size, "fp32") for size in sizes], 100) == [[0, 1], [2], [3, 4], [5]]


@given(
    gradients=gradients_of(["fp32", "bf16"]),
    caps_bytes=st.lists(st.integers(1, 400), min_size=1, max_size=6),
)
def test_ddp_buckets_equal_those_of_torch(gradients: list[Gradient], caps_bytes: list[int]) -> None:
    assert sorted(ddp_buckets(gradients, caps_bytes)) == assigned_by_torch(gradients, caps_bytes)


@given(gradients=gradients_of(["fp32"]), threshold=thresholds)
def test_caps_of_one_dtype_reproduce_the_fused_buckets(gradients: list[Gradient], threshold: int) -> None:
    buckets = fuse(gradients, threshold)
    caps = ddp_caps(gradients, buckets)
    assert caps and len(caps) == len(buckets)
    assert assigned_by_torch(gradients, caps_in_bytes(caps)) == buckets


@given(gradients=gradients_of(["fp32", "bf16"]), threshold=thresholds)
def test_caps_of_several_dtypes_are_exact_or_none(gradients: list[Gradient], threshold: int) -> None:
    buckets = fuse(gradients, threshold)
    caps = ddp_caps(gradients, buckets)
    candidates = [sum(gradients[index].num_bytes for index in bucket) for bucket in buckets]
    if caps:
        assert assigned_by_torch(gradients, caps_in_bytes(caps)) == sorted(buckets)
    else:
        assert all(ddp_buckets(gradients, [size]) != buckets for size in candidates)


@pytest.mark.parametrize("num_bytes", [1, 4, 12_345_676, 2**31 + 4, 2**52 + 4])
def test_a_cap_in_mib_is_exact(num_bytes: int) -> None:
    assert caps_in_bytes(ddp_caps([Gradient(num_bytes, "fp32")], [[0]])) == [num_bytes]


def test_ddp_makes_the_fused_buckets_from_the_second_backward_on() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width + 7) for width in (3, 10, 17, 24, 31)))
    # Backward produces these gradients in the reverse order of registration.
    parameters = list(model.parameters())[::-1]
    index_of: dict[torch.Tensor, int] = {parameter: index for index, parameter in enumerate(parameters)}
    gradients = [Gradient(parameter.nbytes, "fp32") for parameter in parameters]
    buckets = fuse(gradients, 3000)
    assert 2 < len(buckets) < len(gradients)
    caps = ddp_caps(gradients, buckets)
    seen: list[list[int]] = []

    def record(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append([index_of[parameter] for parameter in bucket.parameters()])
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(model, bucket_cap_mb_list=caps)  # type: ignore[arg-type]  # torch's stub has int
        ddp.register_comm_hook(None, record)
        for _ in range(2):
            seen.clear()
            ddp(torch.ones(1, 3)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert seen == buckets
