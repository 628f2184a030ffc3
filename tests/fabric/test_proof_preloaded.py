"""A plugin that links CUDA's runtime, which a trainer loads from a wheel's folder: the loader does not look there."""

import importlib.util
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from muster.entrypoint.fabric import Need, launch, proof
from muster.entrypoint.fabric.launch import Mounts
from muster.entrypoint.fabric.proof import Image
from muster.errors import MusterError
from tests.fabric import nodes

NAME = "libcudart.so.77"


def torch(folder: Path, *of_torch: str) -> Path:
    """A torch that needs the libraries `of_torch`; the wheels have a CUDA runtime and a library that nothing uses."""
    packages = folder / "site-packages"
    paths = {name: nodes.library(packages / f"nvidia/cu77/lib/{name}") for name in (NAME, "libunused.so.77")}
    search = "-Wl,-rpath,$ORIGIN:$ORIGIN/../../nvidia/cu77/lib"
    inner = nodes.library(packages / "torch/lib/libc10_cuda.so", "", search, *(paths[name] for name in of_torch))
    nodes.library(packages / "torch/lib/libtorch_cuda.so", "", search, inner)
    return packages / "torch"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with a plugin that needs CUDA's runtime, and without that runtime."""
    root = nodes.host(tmp_path / "host")
    folder = Path(f"{root}{nodes.FOLDER}")
    cudart = nodes.library(tmp_path / f"elsewhere/{NAME}")
    needs = (folder / "libfabric.so.1", folder / "libcxi.so.1", cudart)
    nodes.library(folder / "libnccl-net.so", nodes.PLUGIN.format(net="Libfabric"), *needs)
    return root


def proved(folder: Path, host: Path, torch: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that are loaded when a launch on two nodes proves that the plugin opens."""
    package = ModuleSpec("torch", None, origin=str(torch / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: package)
    (folder / "own/dev").mkdir(parents=True)
    (folder / "own/dev/cxi0").touch()
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), "LOADED": str(folder / "loaded")}
    launch.for_need(Need(2, True), env, mounts=Mounts(host, folder / "bound", folder / "own"))
    return nodes.loaded(folder / "loaded")


def test_it_is_proved_with_what_torch_has_loaded(tmp_path: Path, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = proved(tmp_path, host, torch(tmp_path, NAME), monkeypatch)
    # First the wheel's copy, and of torch nothing else.
    assert loaded[0] == NAME
    assert sorted(loaded[1:]) == ["libcxi.so.1.5.0", "libfabric.so.1.25.0", "libnccl-net.so"]


def test_a_runtime_not_loaded_by_torch_is_missing(tmp_path: Path, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MusterError, match="neither the host nor the image") as refused:
        proved(tmp_path, host, torch(tmp_path), monkeypatch)
    assert f"{NAME}, needed by {nodes.FOLDER}/libnccl-net.so" in refused.value.seen


def test_what_the_host_has_of_it_is_taken(tmp_path: Path, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime of another version than torch's: both can be loaded."""
    nodes.library(Path(f"{host}{nodes.FOLDER}/{NAME}"))
    assert NAME in proved(tmp_path, host, torch(tmp_path), monkeypatch)


def test_a_preload_that_does_not_open_is_no_error(tmp_path: Path) -> None:
    nodes.library(tmp_path / "libalone.so")
    env = {**os.environ, "LD_PRELOAD": "/nonexistent/libcudart.so.77"}
    proof.prove(tmp_path, ["libalone.so"], Image(env, tmp_path / "none"))
