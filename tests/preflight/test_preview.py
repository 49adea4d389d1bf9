from torch import nn

from megabatch.optim.groups import parameter_groups
from megabatch.preflight.preview import list_parameters


def test_every_parameter_is_listed_once_even_if_shared_or_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    groups = parameter_groups(model, weight_decay=0.1)
    rows = list_parameters(model, groups, has_trust_ratio=True)
    assert [(row.name, row.shape, row.group, row.weight_decay, row.trust_ratio) for row in rows] == [
        ("0.weight", (3, 3), "weights", 0.1, True),
        ("0.bias", (3,), "biases", 0.0, False),
        ("1.weight", (3,), "normalisation", 0.0, False),
        ("1.bias", (3,), "normalisation", 0.0, False),
        ("2.bias", (3,), "frozen", 0.0, False),
    ]
    assert not any(row.trust_ratio for row in list_parameters(model, groups, has_trust_ratio=False))
