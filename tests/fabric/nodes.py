"""Hosts made for a test: shared objects that stand in for a fabric's libraries, and plans that name them."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.entrypoint.fabric import Need, stage
from muster.entrypoint.fabric.find import Device, Finding
from muster.entrypoint.fabric.stage import FabricPlan, Injected
from muster.entrypoint.launch.program import Additions
from tests.entrypoint.standins import compiled

FOLDER = "/opt/cray/libfabric/1.25/lib64"
SLINGSHOT = Device("cxi0", "slingshot", "/dev/cxi0")

# A process that loads the library adds a line to the file that LOADED names.
CONSTRUCTOR = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void) {{
    const char *path = getenv("LOADED");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {{ fputs("{name}\\n", file); fclose(file); }}
}}
"""

# A site whose network libraries are in a folder that the loader does not search.
SITE = """
title = "a test"
scheduler = "slurm"
status = "unverified"
extends = "slingshot"

[sources.here]
url = "https://example.org"
read = 2026-11-21

[libraries.search]
value = ["{folder}"]
source = "here"
"""

PLUGIN = """
extern int fi_version(void);
struct {{ const char *name; int (*ask)(void); }} ncclNetPlugin_v8 = {{ "{net}", fi_version }};
"""


def library(path: Path, source: str = "", *needs: Path | str, soname: str | None = None) -> Path:
    """Compiles `path`, a shared object that writes a line when it is loaded, and needs the libraries `needs`."""
    text = CONSTRUCTOR.format(name=path.name) + source
    options = [f"-Wl,-soname,{soname or path.name}", "-Wl,--no-as-needed", "-x", "none", *map(str, needs)]
    return compiled(text, path, *options)


def host(root: Path, net: str = "Libfabric") -> Path:
    """A host's root with Slingshot, its libfabric and libcxi, and a plugin that needs both.

    The profile knows the folder of the libraries; the loader does not search it. Libfabric has the symbol versions that
    a distribution's programs need of it, so that it may take the place of the distribution's.
    """
    (root / "etc").mkdir(parents=True, exist_ok=True)
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/cxi0").touch()
    (root / "sys/class/net/hsn0").mkdir(parents=True, exist_ok=True)
    folder = root / FOLDER.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "versions"
    script.write_text("FABRIC_1.0 { global: fi_version; };\n" + "".join(f"FABRIC_1.{n} {{ }};\n" for n in range(1, 9)))
    cxi = library(folder / "libcxi.so.1.5.0", soname="libcxi.so.1")
    version = "int fi_version(void) { return 65561; }"
    fabric = library(
        folder / "libfabric.so.1.25.0", version, cxi, f"-Wl,--version-script={script}", soname="libfabric.so.1"
    )
    library(folder / "libnccl-net.so", PLUGIN.format(net=net), fabric, cxi)
    for file in (cxi, fabric):
        link = file.with_name(".".join(file.name.split(".")[:3]))
        link.unlink(missing_ok=True)
        link.symlink_to(file.name)
    return root


def planned(root: Path, **changes: object) -> FabricPlan:
    """The plan for `host(root)`, with some of its values changed."""
    values: dict[str, object] = {
        "finding": Finding(root, "slingshot", "/dev/cxi0", (SLINGSHOT,), ("hsn0",)),
        "injected": (
            Injected("libnccl-net.so", f"{FOLDER}/libnccl-net.so", "slingshot"),
            Injected("libfabric.so.1", f"{FOLDER}/libfabric.so.1.25.0", "libnccl-net.so"),
            Injected("libcxi.so.1", f"{FOLDER}/libcxi.so.1.5.0", "libfabric.so.1"),
        ),
        "plugin": "libnccl-net.so",
        "net": "Libfabric",
        "variables": {"FI_CXI_RX_MATCH_MODE": "hybrid", "NCCL_SOCKET_IFNAME": "hsn"},
    }
    return FabricPlan(**{**values, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Staged:
    """The folder that a launch uses for its links, the names of the links, and the launch's settings."""

    folder: Path
    links: list[str]
    settings: Additions


def staged(plan: FabricPlan, env: Mapping[str, str], need: Need, *, is_dry: bool = False) -> Staged:
    """Makes the links and settings of a plan, as a launch does."""
    folder = stage.link(plan, env, is_dry=is_dry)
    return Staged(folder, [each.soname for each in plan.injected], stage.settings(plan, env, need, folder))


def loaded(path: Path) -> list[str]:
    """The names of the stand-ins that were loaded, in the order of their constructors."""
    return path.read_text().split() if path.exists() else []


def run(*words: object, **options: object) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end."""
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=240, **options)  # type: ignore[call-overload]
