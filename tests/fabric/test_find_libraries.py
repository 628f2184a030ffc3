"""Reading shared objects, NCCL's plugins and the loader's cache: valid ones and damaged ones."""

import os
import platform
import re
import struct
import sysconfig
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import HealthCheck, given, settings, strategies as st

from muster.entrypoint.fabric import find
from muster.entrypoint.fabric.find import CACHE, HostLibraries, HostRoot, Library, NetPlugin
from muster.entrypoint.fabric.stage import NCCL_PLUGINS
from tests.fabric import trees
from tests.fabric.trees import CACHE_FLAGS, Tree, cache_bytes


def library(host: Tree, path: str) -> Library | None:
    return find.read_library(HostRoot(host.root), path)


def test_the_names_and_needs_of_a_library_are_read(host: Tree) -> None:
    path = "/opt/fab/libfab.so.1.2"
    needs = {"libnl.so.3": ["NL_3", "NL_4"], "libplain.so": []}
    host.library(path, "libfab.so.1", ["FAB_1.0", "FAB_1.1"], needs, ["-rpath", "$ORIGIN/../lib:/opt/x"])
    read = library(host, path)
    assert read is not None
    assert (read.path, read.soname, read.needed) == (path, "libfab.so.1", ("libnl.so.3", "libplain.so"))
    assert (read.rpath, read.runpath) == ((), ("/opt/fab/../lib", "/opt/x"))


def test_a_library_without_a_name_has_its_files(host: Tree) -> None:
    host.library("/plain.so")
    read = library(host, "/plain.so")
    assert read is not None
    assert read.soname == "plain.so"


@pytest.mark.parametrize("soname", ["../evil.so", "/etc/evil.so", "a:b", "..", "new\nline.so", "a b", "a$LIB"])
def test_a_soname_that_is_no_name_is_not_taken(host: Tree, soname: str) -> None:
    host.library("/libgood.so", soname)
    read = library(host, "/libgood.so")
    assert read is not None
    assert read.soname == "libgood.so"


def test_files_that_are_no_libraries_give_none(host: Tree) -> None:
    files = {
        "/script.so": "/* GNU ld script */\nINPUT ( /usr/lib64/libfab.so.1 AS_NEEDED ( -lnl ) )\n",
        "/empty.so": "",
        "/short.so": b"\x7fELF",
        "/archive.so": b"!<arch>\n",
    }
    for path, content in files.items():
        assert find.net_plugin(host.file(path, content)) == NetPlugin()
        assert library(host, path) is None
    os.mkfifo(host.at("/pipe.so"))
    for path in ("/pipe.so", "/none.so", "/"):
        assert library(host, path) is None


@pytest.fixture(scope="module")
def plugin_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, bytes]:
    tree = Tree(tmp_path_factory.mktemp("elf") / "host")
    needs = {"libfab.so.1": ["FAB_1.0", "FAB_1.1"], "libc.so.6": ["GLIBC_2.36"]}
    return tree, tree.plugin("/net.so", [8, 10], "Libfabric", needs).read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_damaged_libraries_are_read_without_an_error(plugin_bytes: tuple[Tree, bytes], data: st.DataObject) -> None:
    host, valid = plugin_bytes
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(0, 4))):
        # Sizes and offsets are in the header, and in the tables at the end.
        place = data.draw(st.one_of(st.integers(0, 600), st.integers(len(valid) - 1500, len(valid) - 1)))
        damaged[place] = data.draw(st.integers(0, 255))
    path = host.file("/damaged.so", bytes(damaged[: data.draw(st.integers(0, len(valid)) | st.just(len(valid)))]))
    read = library(host, "/damaged.so")
    assert read is None or find.is_name(read.soname)
    assert all(isinstance(version, int) for version in find.net_plugin(path).versions)


def test_a_plugin_tells_its_name_and_versions(host: Tree) -> None:
    assert find.net_plugin(host.plugin("/a.so", [6, 8, 10], "Libfabric")) == NetPlugin("Libfabric", (6, 8, 10))
    assert find.net_plugin(host.plugin("/b.so", [5], "AWS Libfabric")) == NetPlugin("AWS Libfabric", (5,))
    assert find.net_plugin(host.library("/c.so")) == NetPlugin(None, ())


def test_the_installed_nccl_opens_the_assumed_plugin_versions() -> None:
    path = Path(sysconfig.get_path("platlib"), "nvidia/nccl/lib/libnccl.so.2")
    if not path.exists():
        pytest.skip("needs a torch with NCCL")
    opened = {int(number) for number in re.findall(rb"\0ncclNetPlugin_v([0-9]+)(?=\0)", path.read_bytes())}
    assert min(opened) == NCCL_PLUGINS[0]
    # An older torch's NCCL opens fewer.
    assert opened <= set(NCCL_PLUGINS)


def test_a_plugin_that_is_relocated_in_the_compact_way(host: Tree) -> None:
    """With -z pack-relative-relocs, a pointer's value is stored in the pointer itself, not in the relocation."""
    path = host.plugin("/a.so", range(1, 9), "Libfabric", options=["-z", "pack-relative-relocs"])
    with path.open("rb") as file:
        kinds = {section["sh_type"] for section in ELFFile(file).iter_sections()}
    assert "SHT_RELR" in kinds
    assert find.net_plugin(path) == NetPlugin("Libfabric", tuple(range(1, 9)))


def test_a_plugin_whose_name_is_a_symbol(host: Tree) -> None:
    source = """
.section .rodata
.globl plugin_name
.type plugin_name, %object
plugin_name: .asciz "AWS Libfabric"
.size plugin_name, 14
.data
.globl ncclNetPlugin_v8
.type ncclNetPlugin_v8, %object
ncclNetPlugin_v8: .quad plugin_name
.size ncclNetPlugin_v8, 8
"""
    assert find.net_plugin(host.library("/a.so", source=source)) == NetPlugin("AWS Libfabric", (8,))


def test_a_plugin_that_makes_its_name_up_as_it_is_loaded(host: Tree) -> None:
    source = """
.bss
.globl ncclNetPlugin_v8
.type ncclNetPlugin_v8, %object
ncclNetPlugin_v8: .skip 168
.size ncclNetPlugin_v8, 168
"""
    assert find.net_plugin(host.library("/a.so", source=source)) == NetPlugin(None, (8,))


def test_a_plugin_for_aarch64(host: Tree) -> None:
    """There is no other assembler here: the architecture and the kind of relocation are put into a file of this one."""
    path = host.plugin("/a.so", [8], "Libfabric")
    with path.open("rb") as file:
        parsed = ELFFile(file)
        if parsed.header["e_machine"] != "EM_X86_64":
            pytest.skip("this is aarch64: the other tests are this one")
        table = next(section for section in parsed.iter_sections("SHT_RELA"))
        kinds = [table["sh_offset"] + 24 * index + 8 for index in range(table.num_relocations())]
    data = bytearray(path.read_bytes())
    for place in kinds:
        assert struct.unpack_from("<I", data, place)[0] == 8
        # R_AARCH64_RELATIVE in place of R_X86_64_RELATIVE.
        struct.pack_into("<I", data, place, 1027)
    path.write_bytes(data)
    assert find.net_plugin(trees.as_machine(path, 183)) == NetPlugin("Libfabric", (8,))


OWN = CACHE_FLAGS[platform.machine()]
ENTRIES = [
    ("libfab.so.1", "/opt/fab/lib/libfab.so.1", OWN, 0),
    ("libfab.so.1", "/usr/lib64/libfab.so.1", OWN, 0),
    ("libfast.so.1", "/usr/lib64/glibc-hwcaps/x86-64-v3/libfast.so.1", OWN, 1 << 62),
    ("libfast.so.1", "/usr/lib64/libfast.so.1", OWN, 0),
]
VALID = cache_bytes(ENTRIES)


@pytest.mark.parametrize("in_old", [False, True])
def test_the_hosts_cache_without_what_is_for_certain_processors(host: Tree, in_old: bool) -> None:
    host.file(CACHE, cache_bytes(ENTRIES, in_old=in_old))
    found = HostLibraries(HostRoot(host.root))
    assert found.cached == {
        "libfab.so.1": ["/opt/fab/lib/libfab.so.1", "/usr/lib64/libfab.so.1"],
        "libfast.so.1": ["/usr/lib64/libfast.so.1"],
    }
    assert found.root.notes == []


@pytest.mark.parametrize("data", [b"", b"no cache", b"ld.so-1.7.0", VALID[:47], None])
def test_a_cache_that_is_damaged_or_missing_is_empty_with_a_note(host: Tree, data: bytes | None) -> None:
    if data is not None:
        host.file(CACHE, data)
    host.library("/usr/lib64/libfab.so.1", "libfab.so.1")
    found = HostLibraries(HostRoot(host.root))
    assert found.cached == {}
    assert len(found.root.notes) == 1
    assert "only its loader's own folders" in found.root.notes[0]
    assert found.find("libfab.so.1") is not None
