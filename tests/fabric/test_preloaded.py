"""A plugin that links CUDA's runtime: a trainer has it from a wheel's folder, where the loader does not look."""

import os
import platform
from pathlib import Path

import pytest

from entrypoint.fabric import automatic, inventory, preloaded, proof
from entrypoint.fabric.inventory import Copy, Inventory
from entrypoint.fabric.loader import MACHINES
from entrypoint.fabric.need import Need, Places
from entrypoint.fabric.stage import Staging
from tests.fabric import nodes
from train.errors import MusterError

NAME = "libcudart.so.77"


def image(folder: Path, *of_torch: str) -> dict[str, Copy]:
    """Wheels with a CUDA runtime and a library that nothing uses, and with a torch that needs `of_torch`."""
    packages = folder / "site-packages"
    paths = {name: nodes.library(packages / f"nvidia/cu77/lib/{name}") for name in (NAME, "libunused.so.77")}
    needed = [paths[name] for name in of_torch]
    inner = nodes.library(packages / "torch/lib/libc10_cuda.so", "", *needed)
    paths["libc10_cuda.so"] = inner
    paths["libtorch_cuda.so"] = nodes.library(packages / "torch/lib/libtorch_cuda.so", "", inner)
    return {name: Copy(str(path), frozenset()) for name, path in paths.items()}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """One whose plugin needs CUDA's runtime, which the image has."""
    root = nodes.host(tmp_path / "host")
    folder = Path(f"{root}{nodes.FOLDER}")
    cudart = nodes.library(tmp_path / f"elsewhere/{NAME}")
    needs = (folder / "libfabric.so.1", folder / "libcxi.so.1", cudart)
    nodes.library(folder / "libnccl-net.so", nodes.PLUGIN.format(net="Libfabric"), *needs)
    return root


def proved(folder: Path, host: Path, libraries: dict[str, Copy], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is loaded as the plugin is proved, in a launch on two nodes."""
    found = Inventory(MACHINES[platform.machine()], libraries, {})
    monkeypatch.setattr(inventory, "load", lambda: found)
    (folder / "own/dev").mkdir(parents=True)
    (folder / "own/dev/cxi0").touch()
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), "LOADED": str(folder / "loaded")}
    automatic.for_need(Need(2, True), env, places=Places(host, folder / "bound", folder / "own"))
    return nodes.loaded(folder / "loaded")


@pytest.fixture
def machine(libraries: Inventory) -> dict[str, Copy]:
    """This machine's C library, which the stand-ins need."""
    return {name: copy for name, copy in libraries.libraries.items() if name.startswith(("libc.", "ld-"))}


def test_it_is_proved_with_what_torch_has_loaded(
    tmp_path: Path, host: Path, machine: dict[str, Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {**machine, **image(tmp_path, NAME)}
    loaded = proved(tmp_path, host, libraries, monkeypatch)
    # First the wheel's copy, and of torch nothing else.
    assert loaded[0] == NAME
    assert sorted(loaded[1:]) == ["libcxi.so.1.5.0", "libfabric.so.1.25.0", "libnccl-net.so"]


def test_what_torch_does_not_load_is_missed(
    tmp_path: Path, host: Path, machine: dict[str, Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MusterError, match="can't be loaded") as refused:
        proved(tmp_path, host, {**machine, **image(tmp_path)}, monkeypatch)
    assert f"{NAME}: cannot open shared object file" in refused.value.seen


def test_what_is_staged_or_on_the_loaders_path_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = image(tmp_path, NAME)
    system = nodes.library(tmp_path / "lib/libz.so.1")
    libraries["libz.so.1"] = Copy(str(system), frozenset())
    monkeypatch.setattr(inventory, "load", lambda: Inventory(MACHINES[platform.machine()], libraries, {}))
    cudart = Path(libraries[NAME].path)
    plugin = nodes.library(tmp_path / "libnccl-net.so", "", cudart, system)
    assert preloaded.needed_by([plugin]) == (str(cudart),)
    assert preloaded.needed_by([plugin, cudart]) == ()
    del libraries["libtorch_cuda.so"]
    assert preloaded.needed_by([plugin]) == ()


def test_one_that_does_not_open_is_told_by_who_needs_it(tmp_path: Path) -> None:
    nodes.library(tmp_path / "libalone.so")
    proof.prove(Staging(tmp_path), os.environ, ["libalone.so"], loaded=["/nonexistent/libcudart.so.77"])
