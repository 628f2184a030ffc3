"""The network that the ranks used, and whether it is the expected one. NCCL's logs are those of nccl_logs.py."""

import tomllib
from pathlib import Path

import pytest

from muster.check.bench import transport
from muster.check.bench.transport import FOUND, RankTransport, of_gloo, of_nccl
from muster.errors import MusterError
from tests.check.bench.nccl_logs import (
    NCCL_2_12_EFA,
    NCCL_2_18_ROCE,
    NCCL_2_19_SOCKET,
    NCCL_2_20_SLINGSHOT,
    NCCL_2_25_NO_VERBS,
    NCCL_2_27_EFA,
    NCCL_2_27_SHARED,
    NCCL_2_28,
)

ROOT = Path(__file__).parents[3]


def heard(rank: int, text: str, found: str = "", root: str = "/none") -> RankTransport:
    return RankTransport(f"node0{rank + 1}", *transport.expected(found, root), transport.parse_log(text))


def test_rdma_as_expected() -> None:
    told = of_nccl([heard(rank, NCCL_2_20_SLINGSHOT, "slingshot") for rank in range(3)])
    assert (told.network, told.gpudirect, told.error) == ("AWS Libfabric (cxi)", True, None)
    assert told.says == f"NCCL: AWS Libfabric (cxi), with GPUDirect RDMA; expected: slingshot by {FOUND}"
    assert told.notes == ()


def test_tcp_where_rdma_was_expected_is_named_by_host() -> None:
    told = of_nccl([heard(0, NCCL_2_18_ROCE, "infiniband"), heard(1, NCCL_2_19_SOCKET, "infiniband")])
    assert told.error is not None
    assert told.error.wrong == "NCCL uses TCP, but RDMA was expected: node02"
    assert told.error.seen == f"Socket on node02; expected infiniband by {FOUND} on node01"
    assert "muster fabric check" in told.error.fix
    assert "muster fabric plan" in told.error.fix
    assert "--allow-tcp" in told.error.fix


def test_the_node_that_found_no_fabric_is_the_one_that_uses_tcp() -> None:
    told = of_nccl([heard(0, NCCL_2_18_ROCE, "infiniband"), heard(1, NCCL_2_25_NO_VERBS)])
    assert told.error is not None
    assert told.error.wrong.endswith(": node02")


def test_tcp_may_be_allowed() -> None:
    both = [heard(rank, NCCL_2_19_SOCKET, "infiniband") for rank in range(2)]
    told = of_nccl(both, allow_tcp=True)
    assert told.error is None
    assert "as --allow-tcp allows: Socket on node01, node02" in told.notes[0]
    assert of_nccl(both).error is not None


def test_libfabric_over_tcp_is_tcp() -> None:
    text = NCCL_2_12_EFA.replace("Provider is efa", "Provider is tcp;ofi_rxm")
    told = of_nccl([heard(rank, text, "slingshot") for rank in range(2)])
    assert told.error is not None
    assert "AWS Libfabric (tcp;ofi_rxm) on node01, node02" in told.error.seen


def test_a_plugin_that_is_not_used_does_not_count() -> None:
    text = "NCCL INFO NET/OFI Selected Provider is tcp\nNCCL INFO Using network IB\n"
    told = of_nccl([heard(rank, text, "infiniband") for rank in range(2)])
    assert (told.network, told.error) == ("IB", None)


def test_devices_are_a_reason_to_expect_rdma_where_no_launch_has_looked(tmp_path: Path) -> None:
    device = tmp_path / "dev/infiniband/uverbs0"
    device.parent.mkdir(parents=True)
    device.touch()

    def error(found: str) -> MusterError | None:
        return of_nccl([heard(rank, NCCL_2_19_SOCKET, found, str(tmp_path)) for rank in range(2)]).error

    told = error("")
    assert told is not None
    assert f"expected RDMA by {device} on node01" in told.seen
    assert error("off") is not None
    assert error("tcp") is None


def test_tcp_where_there_is_nothing_else() -> None:
    told = of_nccl([heard(rank, NCCL_2_19_SOCKET) for rank in range(2)])
    assert (told.network, told.gpudirect, told.error) == ("Socket", None, None)
    assert told.says == "NCCL 2.19.3+cuda12.3: Socket; nothing shows that there is anything but TCP"


@pytest.mark.parametrize("found", ["infiniband", "a-fabric-of-tomorrow"])
def test_a_log_that_names_no_network_proves_nothing(found: str) -> None:
    told = of_nccl([heard(0, NCCL_2_18_ROCE, found), heard(1, "", found)])
    assert told.error is not None
    assert "does not name the network" in told.error.wrong
    assert told.error.wrong.endswith(": node02")
    assert of_nccl([heard(0, ""), heard(1, "")]).error is None
    assert of_nccl([heard(0, ""), heard(1, "")]).network == "not said"


def test_ranks_on_different_networks() -> None:
    told = of_nccl([heard(0, NCCL_2_27_EFA), heard(1, NCCL_2_28), heard(2, NCCL_2_27_EFA)])
    assert told.error is not None
    assert told.error.seen == "Libfabric (efa) on node01, node03; IB on node02"


def test_without_gpudirect_there_is_a_note_and_no_failure() -> None:
    told = of_nccl(
        [heard(0, NCCL_2_18_ROCE, "infiniband"), heard(1, NCCL_2_18_ROCE.replace("/GDRDMA", ""), "infiniband")]
    )
    assert (told.gpudirect, told.error) == (False, None)
    assert "host's memory on node02" in told.notes[0]
    assert "nvidia-peermem" in told.notes[0]


def test_one_node_uses_no_network() -> None:
    said = transport.parse_log(
        NCCL_2_27_SHARED.replace("NET/IB/10/GDRDMA/Shared", "P2P/CUMEM") + "x NCCL INFO Using network Socket"
    )
    told = of_nccl([RankTransport("node01", "infiniband", is_rdma=True, log=said) for _ in range(2)])
    assert (told.network, told.error) == ("P2P/CUMEM", None)


def test_gloo_says_that_it_is_tcp() -> None:
    both = [RankTransport(f"node0{rank}", "infiniband by it", is_rdma=True, interface="hsn0") for rank in range(2)]
    told = of_gloo(both)
    assert (told.network, told.error) == ("gloo over hsn0", None)
    assert "TCP" in told.says
    assert "infiniband" in told.notes[0]
    assert of_gloo(both[:1]).notes == ()


def test_the_fabrics_without_rdma_are_those_of_the_profiles() -> None:
    profiles = {path.stem: tomllib.loads(path.read_text()) for path in (ROOT / "jobs/fabrics").glob("*.toml")}
    assert {name for name, profile in profiles.items() if not profile["is_rdma"]} == set(transport.NO_RDMA)


def test_devices_without_a_link_are_none(tmp_path: Path) -> None:
    def expected() -> tuple[str, bool]:
        return transport.expected("", str(tmp_path))

    assert expected() == ("", False)
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    (port / "state").write_text("1: DOWN\n")
    assert expected() == ("", False)
    (tmp_path / "dev/cxi0").touch()
    assert expected() == (f"RDMA by {tmp_path}/dev/cxi0", True)
    (port / "state").write_text("4: ACTIVE\n")
    assert expected() == (f"RDMA by {tmp_path}/dev/infiniband/uverbs0", True)
    # A port whose state can't be read counts as one with a link.
    (port / "state").unlink()
    (port / "state").mkdir()
    assert expected() == (f"RDMA by {tmp_path}/dev/infiniband/uverbs0", True)


def test_why_there_is_no_network_is_told_where_nccl_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text(NCCL_2_25_NO_VERBS + "a:1:2 [0] net.cc:9 NCCL WARN Error: network IB not found.\n")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(log))
    assert transport.with_warnings("broken\nmore") == "broken; NCCL says: Error: network IB not found."
    monkeypatch.delenv("NCCL_DEBUG_FILE")
    assert transport.with_warnings(RuntimeError("broken")) == "broken"
