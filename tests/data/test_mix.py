"""MixUp and CutMix: those of torchvision, given the same draws."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megabatch.data.pipeline.mix import Mix, Mixing, cut_box, mix_images, mix_labels
from megabatch.data.settings import AugmentSettings
from megabatch.models.loss import LossSettings, summed_loss

CPU = torch.device("cpu")
BATCH, CLASSES, HEIGHT, WIDTH = 6, 5, 10, 14
IMAGES = torch.randn(BATCH, 3, HEIGHT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 4, 1])
LOGITS = torch.randn(BATCH, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mixtures(count: int, **alphas: Any) -> list[Mix]:
    mixing = Mixing(AugmentSettings(**alphas), 5, CPU, torch.float64)
    found = [mixing(step, index, HEIGHT, WIDTH) for step in range(count // 4) for index in range(4)]
    return [mix for mix in found if mix is not None]


def has_box(mix: Mix) -> bool:
    return len(mix.weights.unique()) > 1 or mix.weights[0, 0].item() in (0.0, 1.0)


def test_mixup_and_cutmix_are_those_of_torchvision(torchvision: ModuleType) -> None:
    from torchvision.transforms import v2

    for mix in mixtures(40, mixup=0.8, cutmix=1.0):
        share = mix.share.item()
        params: dict[str, Any]
        if has_box(mix):
            rows, columns = np.nonzero(mix.weights.numpy() == 0)
            box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) if len(rows) else (0, 0, 0, 0)
            theirs, params = v2.CutMix(num_classes=CLASSES), {"box": box, "lam_adjusted": share}
        else:
            theirs, params = v2.MixUp(num_classes=CLASSES), {"lam": share}
        params |= {"labels": LABELS, "batch_size": BATCH}
        torch.testing.assert_close(mix_images(IMAGES, mix), theirs.transform(IMAGES, params), rtol=0, atol=1e-12)
        targets = mix_labels(LABELS, LOGITS, mix)
        torch.testing.assert_close(targets, theirs.transform(LABELS, params).double(), rtol=0, atol=1e-6)
        assert targets.sum(1).allclose(torch.ones(BATCH).double())


def test_the_box_is_that_of_torchvision(torchvision: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.transforms import v2

    theirs = v2.CutMix(num_classes=CLASSES)
    draws = np.random.default_rng(0)
    for _ in range(50):
        share, row, column = draws.random(), draws.integers(HEIGHT), draws.integers(WIDTH)
        centre = iter([torch.tensor(column), torch.tensor(row)])
        monkeypatch.setattr(theirs._dist, "sample", lambda shape, share=share: torch.tensor(share))
        monkeypatch.setattr(torch, "randint", lambda limit, size, centre=centre: next(centre))
        left, top, right, bottom = theirs.make_params([IMAGES])["box"]
        assert cut_box(share, HEIGHT, WIDTH, int(row), int(column)) == (top, bottom, left, right)


def test_shares_follow_the_beta_distribution_and_half_of_the_microbatches_are_cut() -> None:
    mixed = np.array([mix.share.item() for mix in mixtures(800, mixup=2.0)])
    assert len(mixed) == 800 and len({*mixed}) == 800
    assert abs(mixed.mean() - 0.5) < 0.04 and abs(mixed.var() - 0.05) < 0.01  # a / (2 (2a + 1) 2a), a = 2: 1/20
    both = mixtures(800, mixup=2.0, cutmix=1.0)
    assert abs(sum(map(has_box, both)) - 400) < 70
    assert all(map(has_box, mixtures(40, cutmix=1.0))) and not mixtures(40)
    for mix in both:
        assert mix.weights.mean().item() == pytest.approx(mix.share.item(), abs=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "bce"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_mixture_is_the_mixture_of_the_losses(name: str, smoothing: float) -> None:
    """Both losses are linear in the targets."""
    settings = LossSettings(name=name, label_smoothing=smoothing)  # type: ignore[arg-type]
    for mix in mixtures(8, mixup=0.8, cutmix=1.0):
        share = mix.share.item()
        mine, others = (summed_loss(settings, LOGITS, labels).item() for labels in (LABELS, LABELS.roll(1)))
        ours = summed_loss(settings, LOGITS, mix_labels(LABELS, LOGITS, mix)).item()
        assert ours == pytest.approx(share * mine + (1 - share) * others, rel=1e-12)
    several = F.one_hot(LABELS, CLASSES) | F.one_hot(LABELS.flip(0), CLASSES)  # targets that are not one class
    targets = mix_labels(several, LOGITS, mix)
    torch.testing.assert_close(
        targets, (share * several + (1 - share) * several.roll(1, 0)).double(), rtol=0, atol=1e-6
    )
