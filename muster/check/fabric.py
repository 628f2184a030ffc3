"""Checks the networks that NCCL can use here: `python -P -m muster.check.fabric [--json]`; exits with 1 on a failure.

NCCL falls back to TCP with a message that only NCCL_DEBUG=INFO shows. So this check opens NCCL's plugin as NCCL does,
and asks libfabric for its providers and libibverbs for its devices, in the environment that a run gets.
"""

import ctypes
import glob
import json
import os
import re
import resource
import sys
from dataclasses import asdict, dataclass

from muster import interruption
from muster.check import versions
from muster.errors import one_line
from muster.variables import LaunchVariable

# The symbols under which NCCL may look for a plugin's table of functions, the newest version first.
# Source: https://github.com/NVIDIA/nccl/tree/master/plugins/net
TABLES = [f"ncclNetPlugin_v{number}" for number in range(14, 2, -1)]

# NCCL's own networks, which need no plugin.
BUILT_IN = ("ib", "socket")

DEVICES = ("/dev/infiniband/uverbs*", "/dev/cxi*")

PROVIDERS = {"slingshot": "cxi", "efa": "efa"}
"""The libfabric provider that NCCL's plugin needs, by the name of the fabric that the launch found."""

ENOUGH = 4 * 2**30
"""A sufficient limit of locked memory, in bytes: UCX asks for half a GiB, NCCL registers 4 MiB a channel and peer.

Source: https://github.com/openucx/ucx/blob/master/src/ucs/config/global_opts.c (UCX_MEMLOCK_LIMIT)
Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-buffsize
"""


@dataclass(frozen=True)
class Row:
    """The result of one check.

    Attributes:
        about: plugin, libfabric, verbs, devices, memory or nccl.
        is_good: False where a run would fail, or fall back to TCP; None where it may not matter.
        says: the result in words, or the loader's error message.
        values: the names in the result: providers, devices, the library's path.
    """

    about: str
    is_good: bool | None
    says: str
    values: tuple[str, ...] = ()


def plugin() -> Row:
    """Checks that NCCL's network plugin opens, and that it is the network that NCCL_NET asks for.

    If NCCL_NET_PLUGIN lists several plugins, NCCL takes the first that opens and is that network.

    Source: https://github.com/NVIDIA/nccl/blob/master/src/plugin/net.cc
    """
    names, wanted = os.environ.get("NCCL_NET_PLUGIN", ""), os.environ.get("NCCL_NET", "")
    wanted = "" if wanted.lower() in BUILT_IN else wanted
    if names.lower() == "none":
        return Row("plugin", False if wanted else None, "none, as NCCL_NET_PLUGIN asks for")
    rows = [_opened(name, wanted) for name in names.split(",")]
    return next((row for row in rows if row.is_good), rows[0])


def _opened(name: str, wanted: str) -> Row:
    """The check of the plugin `name`; `wanted` is the network that NCCL_NET asks for, empty for any."""
    # `ofi` stands for libnccl-net-ofi.so. Source: https://github.com/NVIDIA/nccl/blob/master/src/plugin/plugin_open.cc
    file = name if "/" in name or ".so" in name else f"libnccl-net-{name}.so" if name else "libnccl-net.so"
    try:
        library = ctypes.CDLL(file, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as reason:
        return Row("plugin", False if name or wanted else None, str(reason))
    for table in TABLES:
        try:
            net = (ctypes.c_char_p.in_dll(library, table).value or b"").decode(errors="replace")
        except ValueError:
            continue
        path = versions.file_of(getattr(library, table)) or file
        says = f"{path} is {net} ({table})"
        if wanted and wanted.lower() != net.lower():
            return Row("plugin", False, f"{says}, but NCCL_NET={wanted}", (net, path))
        return Row("plugin", True, says, (net, path))
    return Row("plugin", False, f"{file} opens, but has none of the tables {TABLES[-1]} to {TABLES[0]}")


def providers() -> Row:
    """Asks libfabric for its providers, and checks that the one for the fabric is among them.

    Source: https://ofiwg.github.io/libfabric/main/man/fi_getinfo.3.html
    """
    try:
        library = ctypes.CDLL("libfabric.so.1", mode=os.RTLD_NOW | os.RTLD_LOCAL)
        ask, text_of = library.fi_getinfo, library.fi_tostr
        version = library.fi_version() & 0xFFFFFFFF
    except (OSError, AttributeError) as reason:
        return Row("libfabric", None, str(reason))
    ask.argtypes = [ctypes.c_uint32, *[ctypes.c_void_p] * 2, ctypes.c_uint64, *[ctypes.c_void_p] * 2]
    text_of.argtypes, text_of.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_char_p
    each = ctypes.c_void_p()
    code = ask(version, None, None, 0, None, ctypes.byref(each))
    about = f"{versions.file_of(library.fi_version)}, version {version >> 16}.{version & 0xFFFF}"
    wanted = PROVIDERS.get(os.environ.get(LaunchVariable.FABRIC_FOUND, ""))
    if code:
        why = os.strerror(abs(code)) if abs(code) < 200 else code
        return Row("libfabric", False if wanted else None, f"{about}: no providers ({why})")
    names: dict[str, None] = {}
    while each.value:
        # A line of FI_TYPE_INFO:         prov_name: cxi
        found = re.search(r"^\s*prov_name: (.+)$", text_of(each, 0).decode(errors="replace"), re.MULTILINE)
        if found:
            names[found[1]] = None
        # fi_info begins with a pointer to the next one.
        each = ctypes.c_void_p.from_address(each.value)
    says = f"{about}: {', '.join(names)}"
    if wanted and wanted not in names:
        return Row("libfabric", False, f"{says}; without {wanted} NCCL's plugin has no network", tuple(names))
    return Row("libfabric", True, says, tuple(names))


def verbs() -> Row:
    """The devices that libibverbs has a provider for."""
    try:
        library = ctypes.CDLL("libibverbs.so.1", mode=os.RTLD_NOW | os.RTLD_LOCAL)
        get, name_of = library.ibv_get_device_list, library.ibv_get_device_name
    except (OSError, AttributeError) as reason:
        return Row("verbs", None, str(reason))
    get.restype, name_of.restype = ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p
    get.argtypes, name_of.argtypes = [ctypes.POINTER(ctypes.c_int)], [ctypes.c_void_p]
    count = ctypes.c_int(0)
    found = get(ctypes.byref(count))
    names = [(name_of(found[index]) or b"").decode(errors="replace") for index in range(count.value)] if found else []
    about = versions.file_of(get)
    kernels = sorted(os.path.basename(path) for path in glob.glob("/sys/class/infiniband/*"))
    if names:
        return Row("verbs", True, f"{about}: {', '.join(names)}", tuple(names))
    if kernels:
        return Row("verbs", False, f"{about} has no provider for {', '.join(kernels)}, or may not open it")
    return Row("verbs", None, f"{about}: no devices")


def devices() -> Row:
    """Checks that this user may open the fabric's device files, and that InfiniBand adapters have such files."""
    paths = sorted(path for pattern in DEVICES for path in glob.glob(pattern))
    if closed := [path for path in paths if not os.access(path, os.R_OK | os.W_OK)]:
        return Row("devices", False, f"this user may not open {', '.join(closed)}", tuple(paths))
    if not paths and glob.glob("/sys/class/infiniband/*"):
        return Row("devices", False, "none in /dev/infiniband: in docker and podman, --device /dev/infiniband")
    return Row("devices", True if paths else None, ", ".join(paths) or "none in /dev", tuple(paths))


def memory() -> Row:
    """Checks how much memory this user may lock: RDMA locks the memory that it registers."""
    if (limit := resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]) == resource.RLIM_INFINITY:
        return Row("memory", True, "any amount may be locked")
    needed = any(glob.glob(pattern) for pattern in DEVICES)
    if limit >= ENOUGH:
        return Row("memory", True, f"{limit / 2**30:.0f} GiB may be locked")
    says = f"{limit // 1024} KiB may be locked: in docker and podman, --ulimit memlock=-1"
    return Row("memory", False if needed else None, says)


def nccl() -> Row:
    if (found := versions.nccl()) is None:
        return Row("nccl", None, "this torch has none")
    return Row("nccl", True, f"{found['version']}, {found['path']}", (found["version"], found["path"]))


ALL = (plugin, providers, verbs, devices, memory, nccl)


def main(argv: list[str]) -> int:
    """Prints the results; as text, one by one, so the last line shows where it crashed. Returns 1 if one is bad."""
    rows: list[Row] = []
    for ask in ALL:
        row = ask()
        rows.append(row)
        if "--json" not in argv:
            word = {True: "ok", False: "failed", None: "-"}[row.is_good]
            print(f"{row.about:<10}{word:<8}{one_line(row.says)}", flush=True)
    if "--json" in argv:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    return 1 if any(row.is_good is False for row in rows) else 0


if __name__ == "__main__":
    interruption.start("muster fabric check", is_silent=True)  # the launcher, which waits, prints the message
    with interruption.command("muster fabric check"):
        code = main(sys.argv[1:])
    sys.exit(code)
