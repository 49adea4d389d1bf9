"""Operations that CUDA refuses with run.deterministic=true, and the models that use them."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from megabatch_lab.rehearsal import fake_cuda

from megabatch.models.catalog import MODELS, ModelSettings, build_model
from megabatch.ranks.world import World
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import on

ROOT = Path(__file__).parents[2]
# The names in torch's list, and the operations of the fake CUDA that stand for them; none if no network uses them.
REFUSED = {
    "nn.AvgPool3d": ["avg_pool3d_backward"],
    "nn.AdaptiveAvgPool2d": ["_adaptive_avg_pool2d_backward"],
    "nn.AdaptiveAvgPool3d": ["_adaptive_avg_pool3d_backward"],
    "nn.AdaptiveMaxPool2d": ["adaptive_max_pool2d_backward"],
    "nn.FractionalMaxPool2d": ["fractional_max_pool2d_backward"],
    "nn.FractionalMaxPool3d": ["fractional_max_pool3d_backward"],
    "nn.MaxUnpool1d": ["max_unpool2d"],
    "nn.MaxUnpool2d": ["max_unpool2d"],
    "nn.MaxUnpool3d": ["max_unpool3d"],
    "nn.functional.interpolate": [
        "upsample_linear1d_backward",
        "upsample_bilinear2d_backward",
        "upsample_bicubic2d_backward",
        "upsample_trilinear3d_backward",
        "_upsample_bilinear2d_aa_backward",
        "_upsample_bicubic2d_aa_backward",
    ],
    "nn.ReflectionPad1d": ["reflection_pad1d_backward"],
    "nn.ReflectionPad2d": ["reflection_pad2d_backward"],
    "nn.ReflectionPad3d": ["reflection_pad3d_backward"],
    "nn.NLLLoss": ["nll_loss2d_forward"],
    "nn.CTCLoss": ["_ctc_loss_backward"],
    "nn.EmbeddingBag": [],
    "Tensor.put_": ["put_"],
    "histc": ["histc"],
    "bincount": [],
    "median": ["median"],
    "nn.functional.grid_sample": ["grid_sampler_2d_backward", "grid_sampler_3d_backward"],
    "cumsum": ["cumsum"],
    "Tensor.scatter_reduce": [],
    "Tensor.resize_": [],
}
# At these sizes of images, a network does not average its features to a fixed size.
USUAL_SIZES = {"alexnet": 224, "alexnet_bn": 224}
USUAL_SIZE, OTHER_SIZE = 28, 64


def test_fake_cuda_refuses_the_operations_of_torchs_list() -> None:
    text = " ".join((torch.use_deterministic_algorithms.__doc__ or "").split())
    refused = text.partition("operations will throw a")[2].partition("In addition")[0]
    items = [item for item in refused.split("* :")[1:] if "CUDA" in item or "MPS" not in item]
    names = {name for item in items for name in re.findall(r"`torch\.([\w.]+)`", item)}
    # torch 2.11 lists MaxPool3d too, which no model uses; torch 2.15 no longer lists cumsum.
    assert names - set(REFUSED) <= {"nn.MaxPool3d"} and set(REFUSED) - names <= {"cumsum"}
    source = (fake_cuda.HERE / "fake_cuda.cpp").read_text()
    listed = re.findall(r'"(\w+)"', source.partition("NOT_DETERMINISTIC{")[2].partition("}")[0])
    by_type = re.findall(r'name == "(\w+)"', source.partition("adds_floats")[2].partition(";")[0])
    assert {*listed, *by_type} - {"cumsum_"} == {name for each in REFUSED.values() for name in each}


def refused_models(world: World) -> tuple[list[str], list[str]]:
    """Return the models whose backward is refused at the usual size of their images, and at another."""
    refused: tuple[list[str], list[str]] = [], []
    torch.use_deterministic_algorithms(True)
    for name in MODELS:
        for found, size in zip(refused, (USUAL_SIZES.get(name, USUAL_SIZE), OTHER_SIZE), strict=True):
            model = build_model(ModelSettings(name=name), 0, 4, 3, size).to("cuda")
            loss = F.cross_entropy(model(torch.ones(2, 3, size, size, device="cuda")), torch.zeros(2).long().to("cuda"))
            try:
                loss.backward()
            except RuntimeError as error:
                assert "does not have a deterministic implementation" in str(error)
                found.append(name)
    torch.use_deterministic_algorithms(False)
    return refused


def test_docs_name_the_models_whose_backward_is_refused(ranks: RankPool) -> None:
    ((at_usual, at_other),) = ranks.run(refused_models, num_ranks=1, join=on("cuda"), timeout_s=100.0)
    text = " ".join((ROOT / "docs/gpus.md").read_text().split())
    always, sometimes = re.findall(r"CUDA rejects the models (.*?)\. It also rejects (.*?) if they average", text)[0]
    assert at_usual == named_in(always) and at_other == [name for name in MODELS if name in named_in(always, sometimes)]


def named_in(*sentences: str) -> list[str]:
    words = {word for sentence in sentences for word in re.findall(r"`(\w+)`", sentence)}
    return [name for name in MODELS if name in words]
