"""Cluster files: presets, one's own, overrides."""

from pathlib import Path

import pytest

from megabatch.errors import UserError
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.cost import seconds
from megabatch.planning.topology import ClusterShape
from megabatch.simulate.load import load_cluster, numbers, preset_names, read_cluster, with_device

NEEDED = {
    "p40-roce100", "dgx1-v100", "dgx2h-v100", "dgx-a100", "dgx-h100", "r750xa-a100", "xe8545-a100",
    "hkbu-10gbe", "hkbu-ib100", "aws-p3-25gbe", "cpu-1gbe", "cpu-10gbe",
}  # fmt: skip


def test_there_is_a_preset_for_each_cluster_of_the_docs() -> None:
    assert set(preset_names()) >= NEEDED


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    tables = with_device(read_cluster(name))
    sources = tables["sources"]
    for key, _ in numbers({section: values for section, values in tables.items() if section != "sources"}):
        in_curve = key.startswith("device.curves.")
        assert ".".join(key.split(".")[:3]) in sources if in_curve else key in sources, f"{name}: {key} has no source"
    for curves in load_cluster(name).device.curves.values():
        assert all(point.source for curve in curves for point in curve.points)


def test_a_file_of_ones_own_says_only_what_differs(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text('base = "dgx-a100"\n[network]\ngbps = 400\n')
    mine, theirs = load_cluster(str(own)), load_cluster("dgx-a100")
    assert mine.network.gbps == 400 and mine.network.nics == theirs.network.nics
    assert mine.name == "mine" and mine.device == theirs.device


def test_an_override_replaces_a_number_and_its_source() -> None:
    cluster = load_cluster("dgx-a100", ["network.gbps=400", "price.usd_per_rank_hour=2"])
    assert cluster.network.gbps == 400 and cluster.price.usd_per_rank_hour == 2
    assert cluster.sources["network.gbps"] == "given with the command"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.gbs=400", "a cluster has no network.gbs; nearest: network.gbps"),
        ("network.gbps=-1", "network.gbps"),
        ("network.gbps=0", "network.gbps"),
        ("network.gbps=nan", "finite"),
        ("network.gbps=1e300", "finite"),
        ("network.gbps=fast", "network.gbps"),
        ("node.ranks=0", "node.ranks"),
        ("node.ranks=1.5", "node.ranks"),
        ("network.kind=carrier", "network.kind"),
        ("gbps", "is not an override"),
        ("device.variant=nothing", None),
    ],
)
def test_a_wrong_value_gives_one_line(override: str, message: str | None) -> None:
    if message is None:  # found when the curve is fitted
        load_cluster("dgx-a100", [override])
        return
    with pytest.raises(UserError, match=message) as raised:
        load_cluster("dgx-a100", [override])
    assert "\n" not in str(raised.value)


def test_a_wrong_file_gives_one_line(tmp_path: Path) -> None:
    broken, circle, empty = (tmp_path / f"{name}.toml" for name in ("broken", "circle", "empty"))
    broken.write_text("[network\n")
    circle.write_text(f'base = "{circle}"\n')
    empty.write_text("")
    for path, message in (
        (broken, "is not TOML"),
        (circle, "circle"),
        (empty, "device"),
        (tmp_path / "none.toml", "read"),
    ):
        with pytest.raises(UserError, match=message):
            load_cluster(str(path))
    with pytest.raises(UserError, match="nearest: --cluster dgx-a100"):
        load_cluster("dgx-a10")


@pytest.mark.parametrize("ranks", [1, 3, 8, 20, 4096])
def test_ranks_fill_nodes_one_after_another(ranks: int) -> None:
    shape = load_cluster("dgx-a100").shape(ranks)
    assert shape.num_ranks == ranks
    assert shape.num_nodes == -(-ranks // 8)


def test_ranks_of_a_node_share_its_cards() -> None:
    """So a torus crosses as fast as the node's cards carry its bytes, whatever each rank has."""
    cluster, shape = load_cluster("dgx-a100"), ClusterShape.regular(2, 8)
    num_elements = 8 * 16 * 100_000
    torus = ALGORITHMS["torus"](shape, "fp32")
    assert torus
    crossing = torus.phases[1:2]
    links = cluster.links(shape, "fp32")
    taken_s = seconds(torus, shape, num_elements, links) - 2 * 7 * links["node"].alpha_s
    bytes_s = 4 * num_elements / cluster.network.bytes_per_s
    assert crossing[0].axis == "inter_node" and taken_s > bytes_s
    assert links["inter_node"].beta_s_per_byte == pytest.approx(8 / cluster.network.bytes_per_s)
