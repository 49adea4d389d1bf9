"""Class weights, compared with torch's weighted losses and scikit-learn's balanced weights."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import UserError
from megabatch.models.loss import LossSettings, class_weights, summed_loss
from tests.support.rank_pool import RankPool
from tests.support.small_runs import train_small

BATCH, NAMES, COUNTS = 6, ("ant", "bee", "cat", "dog"), (30, 5, 0, 65)
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(BATCH, len(NAMES), dtype=torch.float64, generator=GENERATOR)
HARD = torch.tensor([0, 1, 3, 3, 1, 0])
SOFT = torch.rand(BATCH, len(NAMES), dtype=torch.float64, generator=GENERATOR).softmax(1)
WEIGHTS = torch.tensor([0.5, 4.0, 1.0, 0.25], dtype=torch.float64)


@pytest.mark.parametrize("labels", [HARD, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs_mean_times_its_divisor(labels: torch.Tensor, smoothing: float) -> None:
    """torch's mean divides hard labels by the sum of their weights, and soft ones by the batch."""
    settings = LossSettings(label_smoothing=smoothing)
    theirs = torch.nn.CrossEntropyLoss(WEIGHTS, label_smoothing=smoothing)(LOGITS, labels)
    divisor = WEIGHTS[labels].sum() if labels.ndim == 1 else BATCH
    torch.testing.assert_close(summed_loss(settings, LOGITS, labels, WEIGHTS), theirs * divisor, rtol=1e-12, atol=0)


def test_bce_weights_the_positive_targets() -> None:
    ours = summed_loss(LossSettings(name="bce"), LOGITS, HARD, WEIGHTS)
    positive, negative = F.logsigmoid(LOGITS), F.logsigmoid(-LOGITS)
    by_hand = torch.where(F.one_hot(HARD, len(NAMES)) == 1, WEIGHTS * positive, negative)
    torch.testing.assert_close(ours, -by_hand.sum(), rtol=1e-12, atol=0)


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_auto_equals_scikit_learns_balanced_weights(counts: list[int]) -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels, expected = np.repeat(np.arange(len(counts)), counts), np.ones(len(counts))
    present = np.unique(labels)
    expected[present] = compute_class_weight("balanced", classes=present, y=labels)
    names = [str(number) for number in range(len(counts))]
    found = class_weights(LossSettings(class_weights="auto"), names, counts, sum(counts))
    assert found == pytest.approx(expected, rel=1e-12)


def test_auto_of_bce_balances_positive_and_negative_targets() -> None:
    found = class_weights(LossSettings(name="bce", class_weights="auto"), NAMES, COUNTS, 100)
    assert found == [70 / 30, 95 / 5, 1.0, 35 / 65]
    assert class_weights(LossSettings(name="bce", class_weights="auto"), ["a"], [7], 7) == [1.0]


def test_a_table_leaves_other_classes_at_one_and_names_the_nearest_of_an_unknown_class() -> None:
    assert class_weights(LossSettings(class_weights={"bee": 2.5}), NAMES, COUNTS, 100) == [1.0, 2.5, 1.0, 1.0]
    with pytest.raises(UserError, match=r"loss\.class_weights: .* no class 'cats'; nearest: 'cat'"):
        class_weights(LossSettings(class_weights={"cats": 2.0}), NAMES, COUNTS, 100)


def test_weights_of_one_do_not_change_a_bit(ranks: RankPool) -> None:
    short = ("train.steps=6", "train.evaluate_every=0", "schedule.warmup_epochs=0", "data.augment.mixup=0.2")
    ones = "loss.class_weights={'class 0'=1.0}"
    plain, weighted = (ranks.run(train_small, *short, *more, num_ranks=1)[0] for more in ((), (ones,)))
    assert plain["losses"] == weighted["losses"]
    assert all(np.array_equal(plain["state"][key], weighted["state"][key]) for key in plain["state"])


def test_the_test_loss_has_no_weights(ranks: RankPool) -> None:
    """Only the training loss depends on the weights, if the network does not learn."""
    short = ("train.steps=1", "schedule.warmup_epochs=0", "optim.learning_rate=1e-300", "loss.class_weights=auto")
    plain, weighted = (ranks.run(train_small, *short[:count], num_ranks=1)[0] for count in (3, 4))
    assert plain["losses"] != weighted["losses"]
    assert plain["evaluations"][0].test_loss == weighted["evaluations"][0].test_loss
