"""Hosts and images with the libraries of two releases of Debian: Debian 12 has glibc 2.36, libfabric 1.17 and rdma-core
44; Debian 13 has glibc 2.41, libfabric 2.1 and rdma-core 56. What is allowed is opened with the image's own C library.
"""

import platform
import subprocess
from pathlib import Path

import pytest

from muster.entrypoint.fabric.stage import FabricPlan
from muster.entrypoint.sites.schema import Fabric
from tests.entrypoint.standins import compiled
from tests.fabric import trees
from tests.fabric.trees import Tree, fabric

LIB = f"/usr/lib/{platform.machine()}-linux-gnu"
PLUGIN = "libnccl-net.so"
VERBS = ("libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "/usr/lib/*/libibverbs")
OPENER = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
    char line[4096];
    FILE *maps;
    if (!dlopen(words[1], RTLD_NOW)) { printf("%s\\n", dlerror()); return 1; }
    maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) fputs(line, stdout);
    return 0;
}
"""


def planned(host: Path, image: Path, profile: Fabric) -> FabricPlan:
    return trees.planned(
        host, trees.TreeImage({"LD_LIBRARY_PATH": f"{image}{LIB}:{image}/usr/lib"}, root=image), profile
    )


@pytest.fixture(scope="session")
def opener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that opens a library, and then prints its own memory map."""
    path = tmp_path_factory.mktemp("opener") / "opener"
    # Later options win: this makes a program in place of a shared object.
    compiled(OPENER, path, "-no-pie", "-fno-pic")
    return path


def opened(opener: Path, name: str, image: Path, *folders: Path) -> tuple[str, set[Path]]:
    """Opens a library with the image's own loader; returns the error, which may be empty, and the mapped files."""
    loader = next((image / LIB.lstrip("/")).glob("ld-linux*.so.*"))
    path = ":".join(map(str, [*folders, image / LIB.lstrip("/")]))
    answer = subprocess.run(
        [loader, "--inhibit-cache", "--library-path", path, opener, name],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    mapped = {Path(line.split()[-1]) for line in answer.stdout.splitlines() if ".so" in line.split()[-1]}
    return ("", mapped) if answer.returncode == 0 else (answer.stdout + answer.stderr, set())


def staged(plan: FabricPlan, folder: Path) -> Path:
    """Makes links to the injected libraries in `folder`."""
    return trees.links(folder, plan.finding.root, {one.soname: one.path for one in plan.injected})


def test_libraries_that_need_a_newer_c_library_are_refused(
    bookworm: Path, trixie: Path, opener: Path, tmp_path: Path
) -> None:
    profile = fabric(net="x", host_wins=("libfabric.so.1",))
    plan = planned(trixie, bookworm, profile)
    assert plan.injected == ()
    libfabric = next(refusal for refusal in plan.refusals if "libfabric" in refusal.library)
    assert libfabric.needs == "GLIBC_2.38"
    assert f"the image's {bookworm}/usr/lib" in libfabric.wrong
    folder = trees.links(
        tmp_path / "links", trixie, {name: f"{LIB}/{name}" for name in ("libfabric.so.1", "libefa.so.1")}
    )
    said, _ = opened(opener, "libfabric.so.1", bookworm, folder)
    assert "`GLIBC_2.38' not found" in said


def test_an_older_libfabric_wins_in_a_newer_image_and_opens(
    bookworm: Path, trixie: Path, opener: Path, tmp_path: Path
) -> None:
    plan = planned(bookworm, trixie, fabric(net="x", host_wins=("libfabric.so.1",)))
    assert plan.refusals == ()
    wins = {one.soname: one.wins for one in plan.injected}
    assert wins["libfabric.so.1"]
    if platform.machine() == "x86_64":
        # A library that Debian 13 no longer has.
        assert wins["libpsm_infinipath.so.1"] is False
        by = {one.soname: one.needed_by for one in plan.injected}
        assert "libpsm_infinipath" in by["libinfinipath.so.4"]
    # These are new enough in the image.
    assert not {"libibverbs.so.1", "librdmacm.so.1", "libefa.so.1", "libnl-3.so.200", "libc.so.6"} & set(wins)
    said, mapped = opened(opener, "libfabric.so.1", trixie, staged(plan, tmp_path / "links"))
    assert said == ""
    assert all(path.is_relative_to(bookworm) or path.is_relative_to(trixie) for path in mapped)
    assert any(path.is_relative_to(bookworm) and path.name.startswith("libfabric.so.1") for path in mapped)
    assert any(path.is_relative_to(trixie) and path.name.startswith("libibverbs.so.1") for path in mapped)
    assert any(path.is_relative_to(trixie) and path.name == "libc.so.6" for path in mapped)


def test_verbs_come_as_a_set_with_their_providers_and_open(
    bookworm: Path, trixie: Path, opener: Path, tmp_path: Path
) -> None:
    plan = planned(
        bookworm, trixie, fabric(net="IB", host_wins=("libibverbs.so.1",), sets=(VERBS,), files=("/etc/libibverbs.d",))
    )
    assert plan.refusals == ()
    names = {one.soname for one in plan.injected}
    assert {"libibverbs.so.1", "librdmacm.so.1", "libmlx5-rdmav34.so", "libmlx5.so.1", "libefa-rdmav34.so"} <= names
    # The image's libfabric needs EFA_1.3, which this host's libefa does not have: the set does not name it.
    assert "libefa.so.1" not in names
    assert plan.files == ("/etc/libibverbs.d",)
    folder = staged(plan, tmp_path / "links")
    for name in ("libmlx5-rdmav34.so", "librdmacm.so.1", "libefa-rdmav34.so"):
        said, mapped = opened(opener, name, trixie, folder)
        assert said == ""
        of_verbs = [path for path in mapped if path.name.startswith(("libibverbs", "libmlx5", "librdmacm", "libefa"))]
        assert of_verbs
        assert all(path.is_relative_to(bookworm) for path in of_verbs)
    said, _ = opened(opener, "libfabric.so.1", trixie, folder)
    assert said == ""


def test_the_images_verbs_stay_where_they_suffice(bookworm: Path, trixie: Path) -> None:
    plan = planned(bookworm, trixie, fabric(net="IB", roots=("libibverbs.so.1",), sets=(VERBS,)))
    assert (plan.injected, plan.refusals) == ((), ())
    plan = planned(trixie, bookworm, fabric(net="IB", roots=("libibverbs.so.1",), sets=(VERBS,)))
    assert (plan.injected, plan.refusals) == ((), ())


def test_a_plugin_for_a_newer_libfabric(bookworm: Path, trixie: Path, opener: Path, tmp_path: Path) -> None:
    """FABRIC_1.7 is of libfabric 1.20: an image that has it is enough, whatever the host has."""
    host = Tree(tmp_path / "host")
    host.plugin(f"/opt/ofi/{PLUGIN}", needs={"libfabric.so.1": ["fi_version@FABRIC_1.0", "fi_getinfo@FABRIC_1.7"]})
    host.link("/usr", str(bookworm / "usr"))
    profile = fabric(plugins=(PLUGIN,), search=("/opt/ofi",))
    plan = planned(host.root, trixie, profile)
    assert [one.soname for one in plan.injected] == [PLUGIN]
    said, mapped = opened(opener, PLUGIN, trixie, staged(plan, tmp_path / "links"))
    assert said == ""
    assert any(path.is_relative_to(trixie) and path.name.startswith("libfabric.so.1") for path in mapped)
    refused = planned(host.root, bookworm, profile)
    assert [(one.library, one.needs) for one in refused.refusals] == [(f"/opt/ofi/{PLUGIN}", "FABRIC_1.7")]
    said, _ = opened(opener, str(host.at(f"/opt/ofi/{PLUGIN}")), bookworm)
    assert "`FABRIC_1.7' not found" in said
