"""Reading NCCL's log: lines of real logs of several versions, and the log of the real library."""

import subprocess
import sys
from pathlib import Path

import pytest

from muster.check.bench import transport
from muster.check.bench.transport import NcclLog
from tests.check.bench.nccl_logs import (
    NCCL_2_12_EFA,
    NCCL_2_12_HPCX,
    NCCL_2_18_ROCE,
    NCCL_2_19_SOCKET,
    NCCL_2_20_SLINGSHOT,
    NCCL_2_27_EFA,
    NCCL_2_27_SHARED,
    NCCL_2_28,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NCCL_2_12_EFA, NcclLog("", "AWS Libfabric (efa)", False, True, ("P2P/IPC",))),
        (NCCL_2_12_HPCX, NcclLog("2.12.9+cuda11.6", "IBext")),
        (NCCL_2_20_SLINGSHOT, NcclLog("", "AWS Libfabric (cxi)", False, True)),
        (NCCL_2_27_SHARED, NcclLog("", "IB", False, True, ("P2P/CUMEM",))),
        (NCCL_2_28, NcclLog("", "IB")),
        (NCCL_2_19_SOCKET, NcclLog("2.19.3+cuda12.3", "Socket", True, False, ("SHM",))),
        (NCCL_2_27_EFA, NcclLog("", "Libfabric (efa)")),
    ],
)
def test_what_nccl_says(text: str, said: NcclLog) -> None:
    assert transport.parse_log(text) == said


def test_gpudirect_is_that_of_all_connections() -> None:
    said = transport.parse_log(NCCL_2_18_ROCE)
    assert (said.network, said.gpudirect) == ("IB", True)
    line = "a:1:2 [0] NCCL INFO Channel 02 : 2[c7000] -> 0[87000] [receive] via NET/IB/0\n"
    assert transport.parse_log(NCCL_2_18_ROCE + line).gpudirect is False
    assert transport.parse_log(NCCL_2_28).gpudirect is None


def test_what_is_connected_counts_more_than_what_was_chosen() -> None:
    said = transport.parse_log(
        "x NCCL INFO Using network IB\nx NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    )
    assert (said.network, said.is_tcp) == ("Socket", True)


def test_lines_that_a_program_prints_are_not_taken_for_nccls() -> None:
    assert transport.parse_log("Using network IB\nChannel 00 : 0 -> 1 [send] via NET/IB/0\n") == NcclLog()


def test_what_the_user_wants_of_nccl_stays(tmp_path: Path) -> None:
    named = {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "GRAPH,NET", "NCCL_DEBUG_FILE": f"{tmp_path}/x"}
    transport.request_log(named)
    assert named["NCCL_DEBUG"] == "TRACE"
    assert named["NCCL_DEBUG_SUBSYS"] == "GRAPH,NET,INIT"
    assert named["NCCL_DEBUG_FILE"] == f"{tmp_path}/x"
    every = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "ALL", "NCCL_DEBUG_FILE": "/dev/null"}
    transport.request_log(every)
    assert (every["NCCL_DEBUG"], every["NCCL_DEBUG_SUBSYS"]) == ("INFO", "ALL")
    none = {"NCCL_DEBUG_SUBSYS": "^NET", "NCCL_DEBUG_FILE": "/dev/null"}
    transport.request_log(none)
    assert none["NCCL_DEBUG_SUBSYS"] == "INIT,NET"


def test_the_users_file_is_found_as_nccl_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.socket, "gethostname", lambda: "node01.cluster")
    monkeypatch.setattr(transport.os, "getpid", lambda: 77)
    (tmp_path / "log%.node01.77%x").write_text("said")
    for name, text in ((f"{tmp_path}/log%%.%h.%p%x", "said"), (f"{tmp_path}/none", ""), ("/dev/null", ""), ("", "")):
        monkeypatch.setenv("NCCL_DEBUG_FILE", name)
        assert transport.log_text() == text


REAL = """
import ctypes, os, sys
from muster.check.bench import transport
for name in list(os.environ):
    if name.startswith("NCCL_"):
        del os.environ[name]
os.environ["NCCL_DEBUG_SUBSYS"] = "BOOTSTRAP"
transport.request_log(os.environ)
library = ctypes.CDLL(sys.argv[1])
library.ncclGetUniqueId(ctypes.create_string_buffer(128))
sys.stderr.write(transport.log_text())
"""


def test_the_real_nccl_writes_where_it_is_asked_to() -> None:
    """It starts without a GPU, which is enough for the first lines of its log: in 2.27 those of its bootstrap."""
    found = [Path(folder) / "nvidia/nccl/lib/libnccl.so.2" for folder in sys.path]
    library = next((path for path in found if path.exists()), None)
    if library is None:
        pytest.skip("this torch has no NCCL of its own")
    argv = [sys.executable, "-P", "-c", REAL, str(library)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert "NCCL INFO" in done.stderr
    assert "NCCL INFO" not in done.stdout
