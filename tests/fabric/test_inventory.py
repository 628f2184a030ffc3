"""What an image has: found in it, written down, and read again."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from entrypoint import ROOT
from entrypoint.fabric import inventory
from tests.fabric.trees import Tree

LIB = "/usr/lib64"


@pytest.fixture
def filled(image: Tree) -> Tree:
    image.library(f"{LIB}/libfab.so.1.2", "libfab.so.1", ["FAB_1", "FAB_2"], {"libc.so.6": ["GLIBC_2.36"]})
    image.link(f"{LIB}/libfab.so.1", "libfab.so.1.2")
    image.library(f"{LIB}/libuser.so", "libuser.so.3", needs={"libfab.so.1": ["FAB_2"], "libnone.so.1": ["NONE_1"]})
    image.library(f"{LIB}/libfab/provider.so", "provider.so", needs={"libfab.so.1": ["FAB_1"]})
    image.library(f"{LIB}/libc.so.6", "libc.so.6", ["GLIBC_2.36"])
    image.file(f"{LIB}/libscript.so", "INPUT(libfab.so.1)")
    return image


def test_libraries_and_who_needs_what_of_them(filled: Tree) -> None:
    found = filled.inventory()
    assert set(found.libraries) == {"libfab.so.1", "libuser.so.3", "libc.so.6"}
    copy = found.libraries["libfab.so.1"]
    assert (copy.path, copy.versions) == (f"{LIB}/libfab.so.1.2", {"libfab.so.1", "FAB_1", "FAB_2"})
    # Who needs the C library need not be known, nor who needs what the image has not.
    assert found.users == {"libfab.so.1": {f"{LIB}/libuser.so": {"FAB_2"}, f"{LIB}/libfab/provider.so": {"FAB_1"}}}


def test_modules_of_python_and_the_wheels_of_torch_count(image: Tree) -> None:
    module = f"{sysconfig.get_config_var('DESTSHARED')}/_ssl.so"
    packages = sysconfig.get_path("platlib")
    image.library(f"{LIB}/libssl.so.3", "libssl.so.3", ["OPENSSL_3.0.0"])
    image.library(module, needs={"libssl.so.3": ["OPENSSL_3.0.0"]})
    image.library(f"{packages}/nvidia/nccl/lib/libnccl.so.2", "libnccl.so.2")
    image.library(f"{packages}/torch/lib/libtorch.so", "libtorch.so", needs={"libssl.so.3": ["OPENSSL_3.0.0"]})
    found = image.inventory()
    assert set(found.libraries) == {"libssl.so.3", "libnccl.so.2", "libtorch.so"}
    assert set(found.users["libssl.so.3"]) == {module, f"{packages}/torch/lib/libtorch.so"}


def test_what_is_written_down_is_read_again_byte_by_byte(filled: Tree) -> None:
    found = filled.inventory()
    text = inventory.written(found)
    assert text == inventory.written(filled.inventory())
    filled.file(str(inventory.FILE), text)
    filled.at(f"{LIB}/libuser.so").unlink()
    assert inventory.load(filled.root) == found
    assert inventory.written(inventory.load(filled.root)) == text
    assert found.plugins == inventory.PLUGINS


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"machine": "EM_X86_64", "libraries": [], "users": 3}', "null"])
def test_a_damaged_file_is_not_believed(filled: Tree, text: str) -> None:
    filled.file(str(inventory.FILE), text)
    assert inventory.load(filled.root) == filled.inventory()


def ran(code: str, **env: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), **env},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return answer.stdout


def test_two_builds_write_the_same(filled: Tree) -> None:
    code = f"""
from pathlib import Path
from entrypoint.fabric import inventory
print(inventory.written(inventory.found(Path({str(filled.root)!r}))), end="")
"""
    assert ran(code, PYTHONHASHSEED="1") == ran(code, PYTHONHASHSEED="2") == inventory.written(filled.inventory())


def test_the_command_of_the_images_build(tmp_path: Path) -> None:
    """It writes beside the project, here elsewhere; and little, as it is read at every start."""
    code = f"""
import runpy
from pathlib import Path
import entrypoint
entrypoint.ROOT = Path({str(tmp_path)!r})
runpy.run_module("entrypoint.fabric.inventory", run_name="__main__")
"""
    ran(code)
    text = (tmp_path / "libraries.json").read_text()
    assert len(text) < 500_000
    value = json.loads(text)
    assert "GLIBC_2.17" in value["libraries"]["libc.so.6"][1]
    assert "libc.so.6" not in value["users"]
    packages = Path(sysconfig.get_path("platlib"))
    if (packages / "nvidia/nccl/lib").is_dir():
        assert value["libraries"]["libnccl.so.2"][0].startswith(str(packages))
