"""Cluster files: presets, user files, overrides."""

from pathlib import Path

import msgspec
import pytest

from megabatch.errors import UserError
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.cost import seconds
from megabatch.planning.topology import ClusterShape
from megabatch.simulate.cluster import Cpu
from megabatch.simulate.compute import fit_device
from megabatch.simulate.cores import CoreCosts
from megabatch.simulate.load import load_cluster, numbers, preset_names, read_cluster, with_device
from megabatch.simulate.workload import load_workload

NEEDED = {
    "p40-roce100", "dgx1-v100", "dgx2h-v100", "dgx-a100", "dgx-h100", "r750xa-a100", "xe8545-a100",
    "hkbu-10gbe", "hkbu-ib100", "aws-p3-25gbe", "cpu-1gbe", "cpu-10gbe",
}  # fmt: skip


def test_every_cluster_of_the_docs_has_a_preset() -> None:
    assert set(preset_names()) >= NEEDED


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    tables = with_device(read_cluster(name))
    sources = tables["sources"]
    for key, _ in numbers({section: values for section, values in tables.items() if section != "sources"}):
        in_curve = key.startswith("device.curves.")
        assert ".".join(key.split(".")[:3]) in sources if in_curve else key in sources, f"{name}: {key} has no source"
        assert not str(sources.get(key)).startswith("set in"), f"{name}: {key} lacks a source"
    for curves in load_cluster(name).device.curves.values():
        assert all(point.source for curve in curves for point in curve.points)


def test_a_user_file_contains_only_differences_from_its_base(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text('base = "dgx-a100"\n[network]\ngbps = 400\n')
    mine, theirs = load_cluster(str(own)), load_cluster("dgx-a100")
    assert mine.network.gbps == 400 and mine.network.nics == theirs.network.nics
    assert mine.name == "mine" and mine.device == theirs.device


def test_optional_sections_can_be_overridden() -> None:
    on_cores = {member.name: 0.5 for member in msgspec.structs.fields(CoreCosts)}
    given = ["cpu.cores=4", *(f"cpu.costs.{name}={value}" for name, value in on_cores.items())]
    cluster = load_cluster("cpu-1gbe", given)
    assert cluster.cpu == Cpu(cores=4, costs=CoreCosts(**on_cores))
    with pytest.raises(UserError, match="missing required field costs in cpu"):
        load_cluster("dgx-a100", ["cpu.cores=4"])


def test_a_value_of_a_file_has_a_source_or_the_files_name(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(
        'base = "dgx-a100"\n[network]\ngbps = 400\n[faults]\nrestart_minutes = 2\n[device]\nmemory_gb = 40\n'
        '[sources]\n"network.gbps" = "data sheet"\n'
    )
    mine, theirs = load_cluster(str(own)), load_cluster("dgx-a100")
    changed = {
        "network.gbps": "data sheet",
        "faults.restart_minutes": f"set in {own}",
        "device.memory_gb": f"set in {own}",
    }
    assert theirs.sources["faults.restart_minutes"] == "assumed"
    assert mine.sources == theirs.sources | changed
    alone = tmp_path / "alone.toml"
    alone.write_text(f'base = "{own}"\n[device]\nlike = "v100-mxnet"\nmemory_gb = 16\nvariant = ""\n')
    assert load_cluster(str(alone)).sources["device.memory_gb"] == f"set in {alone}"


def test_a_base_is_relative_to_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "clusters"
    (folder / "below").mkdir(parents=True)
    (folder / "mine.toml").write_text('base = "below/middle.toml"\n[network]\nnics = 3\n')
    (folder / "below" / "middle.toml").write_text('base = "base.toml"\n[network]\ngbps = 25\n')
    (folder / "below" / "base.toml").write_text('base = "dgx-a100"\n[node]\nranks = 5\n')
    for place, name in (
        (tmp_path, "clusters/mine.toml"),
        (folder, "mine.toml"),
        (Path("/"), str(folder / "mine.toml")),
    ):
        monkeypatch.chdir(place)
        cluster = load_cluster(name)
        assert (cluster.network.nics, cluster.network.gbps, cluster.node.ranks) == (3, 25, 5)


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
        (f"network.gbps=1{400 * '0'}", "network.gbps=1e400: expected a finite number"),
        (f"network.gbps=-1{400 * '0'}", "network.gbps=-1e400: expected a finite number"),
        (f"network.gbps=1{5000 * '0'}", "network.gbps=.*too many digits"),
        (f"network.gbps=0x{5000 * 'f'}", "network.gbps=1e6021: expected a finite number"),
        ("name=foo", "overrides of a cluster are section.key=value; nearest: device.name"),
        ("about=foo", "overrides of a cluster are section.key=value; for example network.gbps=400"),
        ("sources=3", "overrides of a cluster are section.key=value; for example network.gbps=400"),
        ("gbps=3", "nearest: network.gbps"),
        ("node.ranks=0", "node.ranks"),
        ("node.ranks=1.5", "node.ranks"),
        ("network.kind=carrier", "network.kind"),
        ("gbps", "is not an override"),
    ],
)
def test_an_invalid_value_gives_a_message_of_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_cluster("dgx-a100", [override])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


def test_unknown_variant_error_names_the_nearest() -> None:
    cluster = load_cluster("dgx-a100", ["device.variant=A100-SXM-80"])
    with pytest.raises(
        UserError, match=r"device\.variant='A100-SXM-80' is not one of .*; nearest: A100-SXM-80GB"
    ) as raised:
        fit_device(cluster, "fp16", load_workload("resnet50"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("override", [[], ["network.gbps=4"]])
@pytest.mark.parametrize("key", ["network", "sources", "device"])
def test_a_number_in_place_of_a_table_is_rejected_in_one_line(tmp_path: Path, key: str, override: list[str]) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(f'base = "dgx-a100"\n{key} = 3\n')
    with pytest.raises(UserError, match=f"^{key}=3: expected a table, got an integer; change it in .*mine.toml$"):
        load_cluster(str(own), override)


def test_an_invalid_file_gives_a_message_of_one_line(tmp_path: Path) -> None:
    broken, circle, empty = (tmp_path / f"{name}.toml" for name in ("broken", "circle", "empty"))
    broken.write_text("[network\n")
    circle.write_text(f'base = "{circle}"\n')
    empty.write_text("")
    latin, long = tmp_path / "latin.toml", tmp_path / "long.toml"
    latin.write_bytes('about = "Köln"\n'.encode("latin-1"))
    long.write_text(f"[network]\ngbps = 1{5000 * '0'}\n")
    for path, message in (
        (broken, "is not TOML"),
        (circle, "circle"),
        (empty, "device"),
        (latin, r"is not text in UTF-8 \(.* at byte 10\); give another"),
        (long, "is not TOML: an integer has too many digits"),
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
    """A torus crosses as fast as the network cards of the node carry its bytes."""
    cluster, shape = load_cluster("dgx-a100"), ClusterShape.regular(2, 8)
    num_elements = 8 * 16 * 100_000
    torus = ALGORITHMS["torus"](shape, "same")
    assert torus
    crossing = torus.phases[1:2]
    links = cluster.links(shape, "same")
    taken_s = seconds(torus, shape, num_elements, links) - 2 * 7 * links["node"].alpha_s
    bytes_s = 4 * num_elements / cluster.network.bytes_per_s
    assert crossing[0].axis == "inter_node" and taken_s > bytes_s
    assert links["inter_node"].beta_s_per_byte == pytest.approx(8 / cluster.network.bytes_per_s)
