"""Find the faulty rank when the checksums of ranks differ."""

import pytest
import torch

from megabatch.training.drift import describe_difference, sum_of_bits

NAMES = ("conv.weight", "linear.weight", "momentum_buffer of conv.weight")


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (
            [[1, 2, 3], [1, 2, 3], [1, 5, 3]],
            "rank 2 differs from the others after step 20, and not after step 10: linear.",
        ),
        (
            [[9, 2, 4], [1, 2, 3], [1, 2, 3]],
            "rank 0 differs from the others after step 20, and not after step 10: conv.",
        ),
        (
            [[1, 2, 3], [1, 2, 4]],
            "rank 1 differs from rank 0 after step 20, and not after step 10: momentum_buffer of conv.weight (ther",
        ),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 3]], "ranks 1, 2 differ from the others after step 20"),
        ([[1, 2, 3]] * 20 + [[1, 0, 3]] * 9, "ranks 20, 21, 22, 23, 24, 25, 26, 27 and 1 more differ from the others"),
    ],
)
def test_the_majority_of_ranks_decides_which_rank_is_wrong(sums: list[list[int]], said: str) -> None:
    assert describe_difference(NAMES, sums, done=20, before=10).startswith(said)


def test_only_checkpoints_that_may_be_wrong_are_reported() -> None:
    assert "checkpoints" not in describe_difference(NAMES, [[1, 2, 3], [1, 2, 3], [1, 5, 3]], 20, 10)
    for sums in ([[0, 2, 3], [1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 2, 4]]):
        assert describe_difference(NAMES, sums, 20, 10).endswith(
            "; checkpoints after step 10 may contain the difference"
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (5, 3, 2, 2)])
def test_every_bit_of_a_tensor_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1, 1 + torch.empty(shape).numel()).to(dtype).reshape(shape)
    if len(shape) == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    before = sum_of_bits(tensor)
    words = tensor.permute(0, 2, 3, 1) if len(shape) == 4 else tensor
    content = words.reshape(-1).view(torch.uint8)  # shares the tensor's memory
    for byte in range(len(content)):
        for bit in range(8):
            content[byte] ^= 1 << bit
            assert sum_of_bits(tensor) != before
            content[byte] ^= 1 << bit
    assert sum_of_bits(tensor) == before
