"""A launch's defaults from its site: those of the network for several nodes only, none in place of a user's setting."""

import socket
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from muster.entrypoint import recording
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import start
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.sites import defaults, profiles, recognise
from muster.entrypoint.sites.recognise import Recognised
from muster.entrypoint.sites.schema import Context
from muster.errors import MusterError
from tests.entrypoint.conftest import RECORDINGS
from tests.sites.profile import VALID, written

ADDRESS = namedtuple("ADDRESS", "family address")
Given = namedtuple("Given", "options variables notes")
INTERFACE = VALID.replace("[network]\n", '[network]\ninterface = {value = "ib", source = "docs"}\n')


def site(folder: Path, text: str = INTERFACE) -> Recognised:
    path = written(folder, text)
    return Recognised("testbooster", "host tb1", profiles.load_site(path, fabrics=folder / "fabrics"))


def given(
    found: Recognised, num_nodes: int = 2, options: LaunchOptions | None = None, is_live: bool = False, **variables: str
) -> Given:
    env = Environment(variables, "tb1", is_live=is_live)
    with_site, added = defaults.of(found, num_nodes, env, options or LaunchOptions())
    return Given(with_site, added.variables, added.notes)


def with_interfaces(monkeypatch: pytest.MonkeyPatch, *names: str, without: str = "") -> None:
    """Simulates the interfaces `names`, with an address, and `without`, with none: a test may not create real ones."""
    found = {name: [ADDRESS(socket.AF_INET, "10.0.0.1")] for name in names}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {without: [], **found})


def test_all_that_a_site_gives_on_several_nodes(tmp_path: Path) -> None:
    found = given(site(tmp_path), SCRATCH="/scratch/me")
    assert found.options == LaunchOptions(address_suffix="i")
    assert found.variables == {"NCCL_SOCKET_IFNAME": "ib", "HF_HOME": "/scratch/me/hf", "NCCL_IB_TIMEOUT": "20"}
    assert found.notes == ("site: Testbooster (host tb1): address suffix i, interface ib, HF_HOME, NCCL_IB_TIMEOUT",)


def test_one_node_needs_no_way_to_others(tmp_path: Path) -> None:
    found = given(site(tmp_path), 1, SCRATCH="/scratch/me")
    assert found.options == LaunchOptions()
    assert found.variables == {"HF_HOME": "/scratch/me/hf"}
    assert found.notes == ("site: Testbooster (host tb1): HF_HOME",)


def test_a_folder_whose_variable_is_not_set_is_left_out(tmp_path: Path) -> None:
    for variables in ({}, {"SCRATCH": ""}):
        found = given(site(tmp_path), 1, **variables)
        assert found.variables == {}
        assert found.notes == ("site: Testbooster (host tb1)",)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("$SCRATCH/hf", "/s/hf"),
        ("${SCRATCH}x/$USER", "/sx/$(reboot)"),
        ("$SCRATCHX/hf", None),
        ("/a b/c", "/a b/c"),
    ],
)
def test_variables_are_put_into_folders_without_a_shell(folder: str, expected: str | None) -> None:
    assert defaults.expanded(folder, {"SCRATCH": "/s", "USER": "$(reboot)"}) == expected


def test_what_the_user_set_stays_and_a_line_says_so(tmp_path: Path) -> None:
    mine = LaunchOptions(address_suffix="x", interface="eth0")
    found = given(site(tmp_path), 2, mine, SCRATCH="/s", HF_HOME="/mine", NCCL_IB_TIMEOUT="22")
    assert found.options == mine
    assert found.variables == {}
    assert found.notes == (
        "site: Testbooster (host tb1)",
        "--address-suffix=x is yours: it was kept",
        "--interface=eth0 is yours: it was kept",
        "HF_HOME=/mine is yours: it was kept",
        "NCCL_IB_TIMEOUT=22 is yours: it was kept",
    )


def test_what_the_user_set_likewise_needs_no_line(tmp_path: Path) -> None:
    found = given(site(tmp_path), 2, LaunchOptions(address_suffix="i", interface="ib"), NCCL_IB_TIMEOUT="20")
    assert found.notes == ("site: Testbooster (host tb1)",)


def test_no_suffix_at_all_is_a_wish_too(tmp_path: Path) -> None:
    found = given(site(tmp_path), MUSTER_ADDRESS_SUFFIX="")
    assert found.options.address_suffix == ""


def test_the_first_interface_with_the_prefix_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_interfaces(monkeypatch, "eth0", "ib10", "ib2", without="ib0")
    found = given(site(tmp_path), is_live=True)
    assert found.options.interface == "ib2"
    assert found.variables["NCCL_SOCKET_IFNAME"] == "ib"
    assert found.notes[0] == "site: Testbooster (host tb1): address suffix i, interface ib2, NCCL_IB_TIMEOUT"
    assert defaults.interface("hsn,eth") == "eth0"


def test_the_source_of_the_interface_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_interfaces(monkeypatch, "ib0", "eth0")
    monkeypatch.setattr(start.recognise, "here", lambda env, options: site(tmp_path))
    env = Environment({"MUSTER_HOSTS": "tb1,tb2"}, "tb1", is_live=True)
    of_site = start.find(env, LaunchOptions(), ["train", "ddp"]).rendezvous
    assert (of_site.interface, of_site.sources["interface"]) == ("ib0", "the profile testbooster")
    of_user = start.find(env, LaunchOptions(interface="eth0"), ["train", "ddp"]).rendezvous
    assert (of_user.interface, of_user.sources["interface"]) == ("eth0", "--interface")


def test_an_interface_that_is_not_here_is_no_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_interfaces(monkeypatch, "eth0")
    found = given(site(tmp_path), is_live=True)
    assert found.options.interface is None
    assert "NCCL_SOCKET_IFNAME" not in found.variables
    assert found.notes[1].startswith("no interface here begins with ib")


# The system refuses to look up a name of 300 letters, as it refuses a path that this user may not enter.
@pytest.mark.parametrize("scratch", ["/nowhere/at/all", "/" + "a" * 300])
def test_a_cache_that_cant_be_written_to_is_left_out(tmp_path: Path, scratch: str) -> None:
    found = given(site(tmp_path), 1, is_live=True, SCRATCH=scratch)
    assert found.variables == {}
    assert found.notes[1].startswith(f"HF_HOME={scratch}/hf of the site is left out")
    found = given(site(tmp_path), 1, is_live=True, SCRATCH=str(tmp_path / "to" / "be" / "made"))
    assert found.variables == {"HF_HOME": str(tmp_path / "to" / "be" / "made" / "hf")}


@pytest.mark.parametrize(("gpu", "is_set"), [(None, False), ("NVIDIA A100", False), ("NVIDIA GH200 480GB", True)])
def test_a_variable_that_is_set_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str | None, is_set: bool
) -> None:
    monkeypatch.setattr(Context, "here", lambda num_nodes, *_: Context(num_nodes, gpu))
    found = site(tmp_path, VALID.replace('{nodes = ">1"}', '{gpu = "GH200"}'))
    assert given(found, 1).variables == ({"NCCL_IB_TIMEOUT": "20"} if is_set else {})


def recorded(**variables: str) -> Environment:
    env = recording.load(RECORDINGS / "slurm" / "b_srun_N2_1per.node02.1.env")
    return replace(env, variables={**env, **variables})


def test_the_place_of_a_launch_has_the_sites_address(tmp_path: Path) -> None:
    path = str(written(tmp_path))
    found = start.find(recorded(), LaunchOptions(site=path), ["train", "ddp"])
    assert found.rendezvous.master_addr == "node01i"
    assert found.rendezvous.sources["master_addr"].endswith(" + i")
    assert found.site is not None
    assert found.site.site.title == "Testbooster"
    mine = start.find(recorded(), LaunchOptions(site=path, address_suffix="-ib"), ["train", "ddp"])
    assert mine.rendezvous.master_addr == "node01-ib"
    assert mine.rendezvous.sources["master_addr"].endswith(" + -ib")
    off = start.find(recorded(), LaunchOptions(site="off"), ["train", "ddp"])
    assert (off.rendezvous.master_addr, off.site, off.of_site.notes) == ("node01", None, ())


def test_an_address_that_leads_nowhere_is_told_with_its_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(written(tmp_path))

    def lookup(host: str, *_: object, **__: object) -> None:
        raise socket.gaierror(-2, f"{host} is not known")

    # No test may depend on this machine's resolver.
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    env = replace(recorded(), is_live=True)
    with pytest.raises(MusterError, match="node01i") as refused:
        start.find(env, LaunchOptions(site=path), ["train", "ddp"])
    assert "site: Testbooster" in refused.value.seen
    assert refused.value.fix.endswith("; or --site off")


def test_a_refused_site_is_shown_but_starts_nothing(tmp_path: Path) -> None:
    line = 'refused = {value = "AMD GPUs need ROCm", source = "docs"}\n'
    path = str(written(tmp_path, line + VALID))
    found = start.find(recorded(), LaunchOptions(site=path), ["train", "ddp"])
    with pytest.raises(MusterError, match="AMD GPUs need ROCm"):
        recognise.check(found.site)
