"""Paths of a host, as in a chroot: nothing of this machine is reached through a link of the host's."""

import errno
import os
from pathlib import Path

import pytest

from muster.entrypoint.fabric.find import HostRoot
from tests.fabric.trees import Tree

HOSTILE = ["a b", "q'\"q", "new\nline", "$(touch x)", "`id`", "-rf", "semi;colon", "*", "ünï"]


@pytest.fixture
def root(host: Tree) -> HostRoot:
    return HostRoot(host.root)


def test_links_are_followed_below_the_root(host: Tree, root: HostRoot) -> None:
    host.file("/usr/lib64/libx.so.1.2", "x")
    host.link("/usr/lib64/libx.so.1", "libx.so.1.2")
    host.link("/lib64", "usr/lib64")
    host.link("/opt/current", "/usr/lib64/../lib64/./libx.so.1")
    for path in (
        "/usr/lib64/libx.so.1.2",
        "/lib64/libx.so.1",
        "/opt/current",
        "lib64//libx.so.1",
        "/opt/../lib64/libx.so.1",
    ):
        assert root.resolve(path) == "/usr/lib64/libx.so.1.2"
    assert root.path("/usr/lib64/libx.so.1.2").read_text() == "x"


@pytest.mark.parametrize("target", ["../../../../../../../../../etc/passwd", "/etc/passwd", "/../../etc/passwd"])
def test_no_link_leads_out_of_the_root(host: Tree, root: HostRoot, target: str) -> None:
    host.link("/a/b/out", target)
    assert root.resolve("/a/b/out") is None
    host.file("/etc/passwd", "the host's")
    assert root.resolve("/a/b/out") == "/etc/passwd"
    assert root.read_text("/a/b/out") == "the host's"


def test_a_folder_that_is_a_link_out_of_the_root_is_none(host: Tree, root: HostRoot, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("not the host's")
    host.link("/folder", str(tmp_path / "secret"))
    assert root.resolve("/folder/file") is None
    assert root.names("/folder") == []
    assert root.glob("/folder/*") == []


def test_paths_that_lead_nowhere_give_nothing(host: Tree, root: HostRoot) -> None:
    host.link("/circle", "circle")
    host.link("/one", "two")
    host.link("/two", "one")
    host.link("/dangling", "nothing")
    host.file("/file", "x")
    for path in ("/circle", "/one", "/dangling", "/none/at/all", "/nul\0byte", "/" + "x" * 5000):
        assert root.resolve(path) is None
        assert root.read_text(path) == ""
        assert root.names(path) == []
    assert root.names("/file") == []
    assert root.file("/") is None


def test_as_many_links_as_the_kernel_follows(host: Tree, root: HostRoot) -> None:
    host.file("/link0", "end")
    for number in range(1, 45):
        host.link(f"/link{number}", f"link{number - 1}")
    assert root.resolve("/link40") == "/link0"
    assert root.resolve("/link41") is None


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_names(host: Tree, root: HostRoot, name: str) -> None:
    host.file(f"/opt/{name}/lib/{name}.so", "x")
    assert root.glob("/opt/*/lib/*.so") == [f"/opt/{name}/lib/{name}.so"]
    assert root.read_text(f"/opt/{name}/lib/{name}.so") == "x"


def test_names_that_are_no_utf8_are_left_out_with_a_note(host: Tree, root: HostRoot) -> None:
    host.file("/opt/good", "x")
    os.mkdir(os.fsencode(host.at("/opt")) + b"/\xff\xfe")
    assert root.names("/opt") == ["good"]
    assert root.glob("/opt/*") == ["/opt/good"]
    assert root.notes == ["left out of /opt: names that are no UTF-8, 1 of them"]


def test_a_folder_that_may_not_be_listed_is_empty_with_a_note(
    host: Tree, root: HostRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.file("/opt/lib/a")

    def refused(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refused)  # root may list all folders
    assert root.glob("/opt/*/a") == []
    assert root.notes == ["left out: /opt, which this user may not list"]


def test_a_link_to_a_name_that_is_no_utf8_leads_nowhere(host: Tree, root: HostRoot) -> None:
    """Its path could not be printed, nor be written into a script."""
    os.mkdir(os.fsencode(host.root) + b"/\xff")
    host.file("/x")
    os.symlink(b"\xff", os.fsencode(host.at("/link")))
    assert root.resolve("/link") is None


def test_patterns_are_of_names_and_hide_what_is_hidden(host: Tree, root: HostRoot) -> None:
    for name in ("/opt/b/lib/x.so", "/opt/a/lib/x.so", "/opt/a/lib/.hidden.so", "/opt/c/bin/x.so"):
        host.file(name)
    assert root.glob("/opt/*/lib/*.so") == ["/opt/a/lib/x.so", "/opt/b/lib/x.so"]
    assert root.glob("/opt/[ac]/*/x.so") == ["/opt/a/lib/x.so", "/opt/c/bin/x.so"]
    assert root.glob("/opt/a/lib/.*") == ["/opt/a/lib/.hidden.so"]
    assert root.glob("/opt/a") == ["/opt/a"]
    assert root.glob("/opt/none/*") == []


def test_a_pipe_is_no_file(host: Tree, root: HostRoot) -> None:
    """Opening it would wait for ever."""
    host.file("/x")
    os.mkfifo(host.at("/pipe"))
    assert root.file("/pipe") is None
    assert root.read_text("/pipe") == ""
