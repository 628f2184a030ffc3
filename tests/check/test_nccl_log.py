"""What NCCL's log says: lines of real logs of several versions, and the real library, which starts without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from check.bench import nccl_log
from check.bench.nccl_log import Said
from tests.check.nccl_logs import (
    NCCL_2_4_OFI,
    NCCL_2_5,
    NCCL_2_12_EFA,
    NCCL_2_12_HPCX,
    NCCL_2_18_ROCE,
    NCCL_2_20_SLINGSHOT,
    NCCL_2_27_EFA,
    NCCL_2_27_SHARED,
    NCCL_2_28,
)

ROOT = Path(__file__).parents[2]

PLUGIN = "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            NCCL_2_5,
            Said("2.5.7+cuda10.0", (), (("IB", 1, 0),), ("P2P/IPC", "SHM"), ("mlx5_0:1/RoCE",), reasons=(PLUGIN,)),
        ),
        (
            NCCL_2_4_OFI,
            Said("2.4.6+cuda10.0", (), (("AWS Libfabric", 1, 0),), devices=("eth0",), provider="tcp;ofi_rxm"),
        ),
        (
            NCCL_2_12_EFA,
            Said("", ("AWS Libfabric",), (("AWS Libfabric", 1, 1),), ("P2P/IPC",), provider="efa"),
        ),
        (
            NCCL_2_12_HPCX,
            Said("2.12.9+cuda11.6", ("IBext",), (), (), ("mlx5_0:1/IB/SHARP", "mlx5_1:1/IB/SHARP"), "", "IBext"),
        ),
        (
            NCCL_2_20_SLINGSHOT,
            Said("", ("AWS Libfabric",), (("AWS Libfabric", 1, 1),), provider="cxi"),
        ),
        (NCCL_2_27_SHARED, Said("", (), (("IB", 1, 1),), ("P2P/CUMEM",))),
        (
            NCCL_2_28,
            Said("", ("IB",), devices=("mlx5_0:1/IB",), reasons=("NET/Plugin: Could not find: libnccl-net.so",)),
        ),
        (NCCL_2_27_EFA, Said("", ("Libfabric",), provider="efa", plugin="Libfabric (v11)")),
    ],
)
def test_what_nccl_says(text: str, said: Said) -> None:
    assert nccl_log.read(text) == said


def test_gpudirect_is_that_of_all_connections() -> None:
    said = nccl_log.read(NCCL_2_18_ROCE)
    assert (said.networks, said.channels, said.gpudirect) == (("IB",), (("IB", 2, 2),), True)
    line = "a:1:2 [0] NCCL INFO Channel 02 : 2[c7000] -> 0[87000] [receive] via NET/IB/0\n"
    assert nccl_log.read(NCCL_2_18_ROCE + line).gpudirect is False
    assert nccl_log.read(NCCL_2_28).gpudirect is None


def test_what_is_connected_counts_more_than_what_was_chosen() -> None:
    said = nccl_log.read(
        "x NCCL INFO Using network IB\nx NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    )
    assert said.networks == ("Socket",)


def test_nothing_that_a_program_prints_is_taken_for_ncclss() -> None:
    assert nccl_log.read("Using network IB\nChannel 00 : 0 -> 1 [send] via NET/IB/0\n") == Said()


def test_what_the_user_wants_of_nccl_stays(tmp_path: Path) -> None:
    named = {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "GRAPH,NET", "NCCL_DEBUG_FILE": f"{tmp_path}/x"}
    nccl_log.ask(named)
    assert named["NCCL_DEBUG"] == "TRACE"
    assert named["NCCL_DEBUG_SUBSYS"] == "GRAPH,NET,INIT"
    assert named["NCCL_DEBUG_FILE"] == f"{tmp_path}/x"
    every = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "ALL", "NCCL_DEBUG_FILE": "/dev/null"}
    nccl_log.ask(every)
    assert (every["NCCL_DEBUG"], every["NCCL_DEBUG_SUBSYS"]) == ("INFO", "ALL")
    none = {"NCCL_DEBUG_SUBSYS": "^NET", "NCCL_DEBUG_FILE": "/dev/null"}
    nccl_log.ask(none)
    assert none["NCCL_DEBUG_SUBSYS"] == "INIT,NET"


def test_the_users_file_is_found_as_nccl_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log.socket, "gethostname", lambda: "node01.cluster")
    monkeypatch.setattr(nccl_log.os, "getpid", lambda: 77)
    (tmp_path / "log%.node01.77%x").touch()
    assert nccl_log.path_of({"NCCL_DEBUG_FILE": f"{tmp_path}/log%%.%h.%p%x"}) == f"{tmp_path}/log%.node01.77%x"
    assert nccl_log.path_of({"NCCL_DEBUG_FILE": f"{tmp_path}/none"}) == ""
    assert nccl_log.path_of({"NCCL_DEBUG_FILE": "/dev/null"}) == ""


REAL = """
import ctypes, os, sys
from check.bench import nccl_log
for name in list(os.environ):
    if name.startswith("NCCL_"):
        del os.environ[name]
os.environ["NCCL_DEBUG_SUBSYS"] = "BOOTSTRAP"
nccl_log.ask(os.environ)
library = ctypes.CDLL(sys.argv[1])
library.ncclGetUniqueId(ctypes.create_string_buffer(128))
sys.stderr.write(nccl_log.text())
"""


def test_the_real_nccl_writes_where_it_is_asked_to() -> None:
    """It starts without a GPU, which is enough for the first lines of its log: in 2.27 those of its bootstrap."""
    found = [Path(folder) / "nvidia/nccl/lib/libnccl.so.2" for folder in sys.path]
    library = next((path for path in found if path.exists()), None)
    if library is None:
        pytest.skip("this torch has no NCCL of its own")
    argv = [sys.executable, "-P", "-c", REAL, str(library)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert "NCCL INFO" in done.stderr
    assert "NCCL INFO" not in done.stdout
