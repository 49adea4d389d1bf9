import msgspec
import pytest
import torch

from megabatch.cli.overrides import choose_ranks
from megabatch.data.catalog import load_data_set
from megabatch.errors import UserError
from megabatch.precision.master_weights import gradients_of
from megabatch.preflight.preview import num_bytes, preview
from megabatch.ranks.world import World
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run


def bytes_in_use(world: World, *overrides: str) -> list[int]:
    """Return the bytes of a real step of one microbatch, in the order of `Memory`."""
    config = small_run(*overrides)
    training = ready_to_train(config, load_data_set(config.data), world)
    model = training.model.module
    tensors = [*model.parameters(), *model.buffers()]
    owned = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage  # keeps the storage alive, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        next(train(training))
    trained = training.master_weights.parameters
    masters = [weight for name, weight in training.master_weights.weights.items() if weight is not trained[name]]
    state = [tensor for values in training.optimizer.state.values() for tensor in values.values() if tensor is not None]
    average = list(training.average.tensors.values())
    saved_bytes = sum(storage.nbytes() for storage in saved.values())
    gradients, unscaled = gradients_of(model.parameters()), gradients_of(masters)
    return [*map(num_bytes, (tensors, masters, gradients, unscaled, state, average)), saved_bytes]


def test_expected_memory_matches_a_step(ranks: RankPool) -> None:
    for overrides in (
        ["batch.global=4", "precision.name=fp64"],
        ["batch.global=4", "precision.name=fp32", "model.name=small_resnet"],
        ["batch.global=4", "optim.momentum=0", "optim.nesterov=false"],
        ["batch.global=4", "precision.name=fp16", "optim.name=lars", "optim.nesterov=false"],
        ["batch.global=4", "precision.name=fp32", "optim.name=lamb"],
        ["batch.global=4", "precision.name=fp32", "optim.name=muon", "optim.momentum=0.8"],
        ["batch.global=4", "precision.name=fp32", "optim.name=torch.optim:Adadelta"],
        ["batch.global=4", "precision.name=amp", "train.ema_half_life_epochs=1"],
    ):
        memory = preview(small_run(*overrides), 1).memory
        computes_in_16_bits = overrides[1] in ("precision.name=fp16", "precision.name=amp")
        *expected, activations = msgspec.structs.astuple(memory)
        *counted, saved = ranks.run(bytes_in_use, *overrides, num_ranks=1)[0]
        assert counted == expected
        # Without content, torch's BatchNorm keeps its mean and deviation in 16 bits; with it, in fp32.
        assert activations == (pytest.approx(saved, rel=0.01) if computes_in_16_bits else saved)
        assert memory.total == sum(expected) + activations
        assert bool(memory.master_weights) == bool(memory.unscaled) == ("precision.name=fp16" in overrides)


def test_the_default_number_of_ranks_divides_the_microbatches_and_is_at_most_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_run("batch.global=24", "run.device=cpu")  # six microbatches
    for cores, expected in ((1, 1), (2, 2), (5, 3), (8, 6), (64, 6)):
        monkeypatch.setattr("megabatch.ranks.machine.usable_cores", lambda cores=cores: range(cores))
        assert choose_ranks(config, None) == expected
    assert choose_ranks(config, 2) == 2
    with pytest.raises(UserError, match="cannot share evenly"):
        choose_ranks(config, 4)
