"""The loader's cache: of glibc's own making, of other formats and architectures, and damaged."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrypoint.fabric import ldcache
from entrypoint.fabric.hostroot import HostRoot
from tests.clusters.requirements import SEARCH_PATH, refuse
from tests.fabric.trees import Tree, cache_bytes

X86, ARM, X32 = 0x0303, 0x0A03, 0x0803
ENTRIES = [
    ("libfab.so.1", "/opt/fab/lib/libfab.so.1", X86, 0),
    ("libfab.so.1", "/usr/lib64/libfab.so.1", X86, 0),
    ("libfab.so.1", "/usr/lib/libfab.so.1", ARM, 0),
    ("libx32.so.1", "/usr/libx32/libx32.so.1", X32, 0),
    ("libfast.so.1", "/usr/lib64/glibc-hwcaps/x86-64-v3/libfast.so.1", X86, 1 << 62),
    ("libfast.so.1", "/usr/lib64/libfast.so.1", X86, 0),
]
VALID = cache_bytes(ENTRIES)


@pytest.mark.parametrize("in_old", [False, True])
def test_the_first_of_an_architecture_and_none_for_other_processors(in_old: bool) -> None:
    data = cache_bytes(ENTRIES, in_old=in_old)
    assert ldcache.parse(data, "x86_64") == {
        "libfab.so.1": "/opt/fab/lib/libfab.so.1",
        "libfast.so.1": "/usr/lib64/libfast.so.1",
    }
    assert ldcache.parse(data, "aarch64") == {"libfab.so.1": "/usr/lib/libfab.so.1"}
    assert ldcache.parse(data, "sparc") == {}


@pytest.mark.parametrize("style", ["new", "compat"])
def test_a_cache_of_glibcs_own_making(host: Tree, tmp_path: Path, style: str) -> None:
    ldconfig = shutil.which("ldconfig", path=SEARCH_PATH)
    if ldconfig is None:
        refuse("missing programs: ldconfig; fix: apt-get install libc-bin")
    folder = tmp_path / "with a space"
    made = Tree(folder)
    made.library("/libplanted.so.1.2", "libplanted.so.1")
    made.link("/libplanted.so.1", "libplanted.so.1.2")
    config, cache = tmp_path / "ld.so.conf", tmp_path / "ld.so.cache"
    config.write_text(f"{folder}\n")
    subprocess.run(
        [ldconfig, "-X", "-c", style, "-f", config, "-C", cache], check=True, timeout=60, capture_output=True
    )
    host.file(ldcache.CACHE, cache.read_bytes())
    root = HostRoot(host.root)
    found = ldcache.read(root)
    assert found["libplanted.so.1"] == f"{folder}/libplanted.so.1"
    assert root.notes == []
    printed = subprocess.run([ldconfig, "-p", "-C", cache], check=True, timeout=60, capture_output=True, text=True)
    for soname in ("libc.so.6", "libm.so.6"):
        assert f"=> {found[soname]}\n" in printed.stdout


@pytest.mark.parametrize("data", [b"", b"no cache", b"ld.so-1.7.0", VALID[:47], VALID[:100], VALID[:-1] + b"x"])
def test_a_damaged_cache_is_empty_with_a_note(host: Tree, data: bytes) -> None:
    host.file(ldcache.CACHE, data)
    root = HostRoot(host.root)
    assert ldcache.read(root, "x86_64") == {}
    assert len(root.notes) == 1
    assert "only its folders" in root.notes[0]


def test_a_missing_cache_is_empty_with_a_note(host: Tree) -> None:
    root = HostRoot(host.root)
    assert ldcache.read(root) == {}
    assert "no /etc/ld.so.cache" in root.notes[0]


@settings(deadline=None)
@given(st.integers(0, len(VALID)), st.binary(max_size=12), st.integers(0, len(VALID)))
def test_no_bytes_do_harm(start: int, damage: bytes, end: int) -> None:
    data = (VALID[:start] + damage + VALID[start + len(damage) :])[:end]
    try:
        found = ldcache.parse(data, "x86_64")
    except ldcache.Damaged:
        return
    assert all(name and path.startswith("/") for name, path in found.items())


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_strings_do_harm(data: bytes) -> None:
    for head in (b"", VALID[:20], VALID[:48], b"ld.so-1.7.0\0"):
        try:
            ldcache.parse(head + data, "x86_64")
        except ldcache.Damaged:
            continue


def test_folders_of_the_configuration_with_what_it_includes(host: Tree) -> None:
    host.file(
        "/etc/ld.so.conf", "# the site's\ninclude ld.so.conf.d/*.conf\n/opt/last/  # that is it\nhwcap 1 nosegneg\n"
    )
    host.file("/etc/ld.so.conf.d/b.conf", "  /opt/b\t\n\nrelative/folder\n/opt/old=libc6\ninclude\tsub/*.conf /etc/x\n")
    host.file("/etc/ld.so.conf.d/a.conf", "/opt/a\r\ninclude /etc/ld.so.conf\n")
    host.file("/etc/ld.so.conf.d/no.txt", "/opt/no\n")
    host.file("/etc/ld.so.conf.d/sub/c.conf", "/opt/c\n")
    host.file("/etc/sub/no.conf", "/opt/no\n")
    host.file("/etc/x", "/opt/x\n")
    root = HostRoot(host.root)
    assert ldcache.configured(root) == ["/opt/a", "/opt/b", "/opt/old", "/opt/c", "/opt/x", "/opt/last"]
    folders = ldcache.folders(root, "x86_64")
    assert folders[-2:] == ["/lib", "/usr/lib"]
    assert {"/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/opt/a"} < set(folders)
    assert "/usr/lib/aarch64-linux-gnu" in ldcache.folders(root, platform.machine().replace("x86_64", "aarch64"))


def test_a_line_of_the_configuration_is_one_folder(host: Tree) -> None:
    """As ldconfig has it: a blank, a comma or a colon belongs to the name."""
    lines = ["/opt/my fabric/lib", "/opt/b:/opt/c,/opt/d", "/opt/e\x0c"]
    host.file("/etc/ld.so.conf", "\n".join(lines))
    assert ldcache.configured(HostRoot(host.root)) == ["/opt/my fabric/lib", "/opt/b:/opt/c,/opt/d", "/opt/e"]
