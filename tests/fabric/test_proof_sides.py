"""Libraries of the image or the driver never come from the host, whatever name a profile or plugin uses for them."""

import pytest

from tests.fabric.test_proof_refusals import refusal
from tests.fabric.test_stage_plan import names, planned
from tests.fabric.trees import Tree, fabric

LIB = "/usr/lib64"
PLUGIN = "libnccl-net.so"


@pytest.mark.parametrize(
    "words",
    [
        {"roots": ("libf.so.1",), "sets": (("libf.so.1", "libstdc++.so.6"),)},
        {"roots": ("libf.so.1", "libstdc++.so.6", "libcuda.so.1")},
        {"host_wins": ("libf.so.1", "libstdc++.so.6")},
    ],
)
def test_sets_roots_and_host_wins_inject_no_such_library(host: Tree, image: Tree, words: dict[str, object]) -> None:
    host.library(f"{LIB}/libf.so.1", "libf.so.1", needs={"libstdc++.so.6": []})
    for tree in (host, image):
        tree.library(f"{LIB}/libstdc++.so.6", "libstdc++.so.6")
    host.library(f"{LIB}/libcuda.so.1", "libcuda.so.1")
    assert list(names(planned(host, image, fabric(net="IB", **words)))) == ["libf.so.1"]


@pytest.mark.parametrize("soname", ["libc.so.6", "libcuda.so.1"])
def test_a_plugin_that_calls_itself_what_never_comes_from_the_host(host: Tree, image: Tree, soname: str) -> None:
    data = host.plugin(f"{LIB}/{soname}").read_bytes()
    host.file(f"{LIB}/{PLUGIN}", data)
    found = refusal(host, image)
    assert f"has the soname {soname}" in found.wrong
    assert found.library == f"{LIB}/{PLUGIN}"


def test_a_plugin_whose_file_has_a_name_that_no_list_can_hold(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/libnccl net.so")
    found = refusal(host, image, fabric(plugins=(f"{LIB}/libnccl net.so",)))
    assert found.library == f"{LIB}/libnccl net.so"


def test_a_library_that_is_a_c_library_under_another_name(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libfab.so.1": []})
    host.library(f"{LIB}/libfab.so.1", "libstdc++.so.6")
    assert refusal(host, image).needs == "libfab.so.1"
