"""The check that this node's NVIDIA driver can run the installed torch, which would otherwise train on the CPU.

A driver runs programs built for the major version of CUDA that it supports, or for an older one. For a newer one there
is forward compatibility: the libcuda.so.1 of the package cuda-compat, put before the driver's own. It works on GPUs for
data centers and not on others, so it is tried.

Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VERSION.html
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
"""

import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.entrypoint import resources
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch.program import Additions, Program
from muster.errors import MusterError
from muster.paths import ROOT, text_of
from muster.units import by_numbers

Version = tuple[int, int]

LIBCUDA = "libcuda.so.1"
TOOLKITS = Path("/usr/local")
"""The folder with CUDA's folders, and their forward-compatibility libraries."""
MODULE_VERSIONS = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))
"""Files with the version of the driver's kernel module."""
PROBE_TIMEOUT_S = 60.0

# The answers of cuInit that a user can do something about.
CUDA_ERRORS = {
    34: "CUDA_ERROR_STUB_LIBRARY",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    100: "CUDA_ERROR_NO_DEVICE",
    802: "CUDA_ERROR_SYSTEM_NOT_READY",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
    999: "CUDA_ERROR_UNKNOWN",
}

PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
code, version = library.cuInit(0), ctypes.c_int()
library.cuDriverGetVersion(ctypes.byref(version))
print("answer", code, version.value)
"""

# The first driver that runs programs of a major version of CUDA without forward compatibility, by that version.
FIRST_DRIVER = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True)
class Toolkit:
    """The version of the installed torch, and the CUDA version that it is built for."""

    torch: str
    cuda: Version

    def __str__(self) -> str:
        return f"torch {self.torch} is built for CUDA {version_text(self.cuda)}"


@dataclass(frozen=True)
class Driver:
    """This node's driver.

    Attributes:
        version: that of the kernel module, as NVIDIA numbers it; None where it is unknown.
        cuda: the newest CUDA that libcuda.so.1 supports; None if that can't be loaded or asked.
        problem: why `cuda` is None.
    """

    version: str | None
    cuda: Version | None
    problem: str = ""

    def __str__(self) -> str:
        return f"driver {self.version}" if self.version else "the driver"


def check(allocation: Allocation, env: Environment, program: Program) -> Additions:
    """The additions by which `program` can use this node's GPUs, whose driver may be older than the installed torch.

    Raises:
        MusterError: it would see none of them, and silently train on the CPU.
    """
    on_cpu = program.is_ours and "--device=cpu" in program.words
    if not allocation.gpus_seen or on_cpu or program.framework != "torch":
        return Additions()
    if (toolkit := toolkit_of(version_file())) is None:
        return Additions()
    try:
        return _check(toolkit, find(), env, program)
    except MusterError as error:
        if program.kind != "program":
            raise
        # Another program may use another torch, or none.
        return Additions(notes=(f"{error.wrong}: {error.seen}",))


def version_file() -> Path | None:
    """The file with the installed torch's version; None without torch, which is not loaded for this."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).with_name("version.py") if spec and spec.origin else None


def toolkit_of(path: Path | None) -> Toolkit | None:
    """The torch that the version.py at `path` describes; None for a torch without CUDA, or without a file.

    The file has such lines:

        __version__ = '2.15.0+cu132'
        cuda: Optional[str] = '13.2'
    """
    text = text_of(path) if path else ""
    torch = re.search(r"^__version__\b[^=\n]*=\s*['\"]([^'\"+]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([0-9]+)\.([0-9]+)", text, re.MULTILINE)
    return Toolkit(torch[1] if torch else "", (int(cuda[1]), int(cuda[2]))) if cuda else None


def find() -> Driver:
    """This node's driver, as programs started here will find it. No GPU is initialised, so this is quick."""
    import ctypes

    version, cuda = _module_version(), ctypes.c_int()
    try:
        code = ctypes.CDLL(LIBCUDA).cuDriverGetVersion(ctypes.byref(cuda))
    except (OSError, AttributeError) as reason:
        return Driver(version, None, str(reason))
    if code:
        return Driver(version, None, f"cuDriverGetVersion answers {_error(code)}")
    return Driver(version, _version(cuda.value))


def _module_version() -> str | None:
    # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@...)
    for path in MODULE_VERSIONS:
        if match := re.search(r"(?<![\w.])[0-9]{3,4}\.[0-9]+(?:\.[0-9]+)?(?![\w.])", text_of(path)):
            return match[0]
    return None


def _check(toolkit: Toolkit, driver: Driver, env: Environment, program: Program) -> Additions:
    needed = toolkit.cuda[0]
    if driver.cuda is None:
        return _without_library(driver, program)
    if driver.cuda[0] >= needed:
        own = _cuda_of(driver.version)
        if own is None or own >= needed or needed not in FIRST_DRIVER:
            return Additions()
        # Newer than the kernel module: something, such as docker's runtime, has put forward compatibility first.
        if not (problem := prove(LIBCUDA, needed, env)):
            return Additions()
        seen = f"{driver} supports CUDA {own}, {toolkit}; the forward-compatibility library found here: {problem}"
        raise _too_old(toolkit, own, seen, program)
    seen = f"{driver} supports CUDA {version_text(driver.cuda)}, {toolkit}"
    if (library := newest_compat()) is None:
        nowhere = f"no forward compatibility at {TOOLKITS}/cuda*/compat/{LIBCUDA}"
        raise _too_old(toolkit, driver.cuda[0], f"{seen}; {nowhere}", program)
    # Without empty elements, which mean the current folder.
    others = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    variables = {"LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys([str(library.parent), *others]))}
    if problem := prove(str(library), needed, {**env, **variables}):
        seen = f"{seen}; forward compatibility by {library}: {problem}"
        raise _too_old(toolkit, driver.cuda[0], seen, program)
    return Additions(variables, (f"{seen}: the forward-compatibility library in {library.parent} is used",))


def _cuda_of(version: str | None) -> int | None:
    """The newest major version of CUDA that driver `version` runs by itself; 0 before 11, None where it is unknown."""
    if version is None:
        return None
    module = int(version.split(".")[0])
    return max((cuda for cuda, first in FIRST_DRIVER.items() if module >= first), default=0)


def newest_compat() -> Path | None:
    """The newest forward-compatibility library that is installed here: /usr/local/cuda-13.2/compat/libcuda.so.1."""

    def age(path: Path) -> tuple[Any, Any, int]:
        # libcuda.so.1 -> libcuda.so.595.45.04; /usr/local/cuda -> /usr/local/cuda-13.2; among equals the shortest.
        file, folder = path.resolve().name, path.parent.resolve().parent.name
        return by_numbers(file), by_numbers(folder), -len(str(path))

    return max(filter(Path.is_file, TOOLKITS.glob(f"cuda*/compat/{LIBCUDA}")), key=age, default=None)


def _without_library(driver: Driver, program: Program) -> Additions:
    fix = "in a container: apptainer exec --nv, docker run --gpus all"
    if not (devices := sorted(map(str, resources.device_nodes()))):
        return Additions(notes=(f"no NVIDIA driver library here, torch will use the CPU; {fix}",))
    raise MusterError(
        "there are GPUs, but no NVIDIA driver library: torch would train on the CPU",
        seen=f"{' '.join(devices)}; {driver.problem}",
        fix=f"{fix}; or {_cpu(program)}",
    )


def _too_old(toolkit: Toolkit, supported: int, seen: str, program: Program) -> MusterError:
    needed = toolkit.cuda[0]
    if needed > 12 and platform.machine() == "aarch64":
        # PyPI's torch 2.10 has CUDA on x86-64 only.
        fix = f"ask for an NVIDIA driver of {FIRST_DRIVER[needed]} or newer: aarch64 has no variant for CUDA 12"
    elif needed > 12 and supported >= 12:
        how = "make image VARIANT=cuda12" if (ROOT / "image.json").is_file() else "install requirements-cuda12.lock"
        fix = f"{how}: torch 2.10 for CUDA 12.8 runs with this driver"
    else:
        fix = "ask for an NVIDIA driver of 525 or newer" + (", and take the variant for CUDA 12" if needed > 12 else "")
    return MusterError(
        "the NVIDIA driver is too old for the installed torch, which would train on the CPU",
        seen=seen,
        fix=f"{fix}; or {_cpu(program)}",
    )


def _cpu(program: Program) -> str:
    return "train on the CPU: --device cpu" if program.is_ours else "run on the CPU: CUDA_VISIBLE_DEVICES= muster run"


def version_text(version: Version) -> str:
    """`version` as NVIDIA writes it: 12.4."""
    return f"{version[0]}.{version[1]}"


def prove(library: str, needed: int, env: Mapping[str, str], timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """The reason why `library` can't run programs built for CUDA `needed` on this node's GPUs; empty if it can.

    It is loaded and initialised in a process of its own, with the variables `env`.

    Raises:
        MusterError: it takes longer than `timeout_s`.
    """
    from muster.entrypoint.fabric import proof

    done = proof.run_python(PROBE, [library], env, timeout_s)
    if isinstance(done, str):
        raise MusterError(
            "the NVIDIA driver does not answer to cuInit",
            seen=f"{library}: {done}",
            fix="look at this node's GPUs with nvidia-smi, or leave the node out",
        )
    # The two numbers are after "answer" in the last line: a library may have printed lines before.
    words = (done.stdout.splitlines() or [""])[-1].split()
    if done.returncode or len(words) != 3 or words[0] != "answer":
        return proof.reason_of_end(done)
    code, cuda = int(words[1]), _version(int(words[2]))
    if code:
        return f"cuInit answers {_error(code)}"
    return "" if cuda[0] >= needed else f"it supports CUDA {version_text(cuda)}"


def _error(code: int) -> str:
    return f"{CUDA_ERRORS.get(code, 'a CUDA error')} ({code})"


def _version(number: int) -> Version:
    # 12040 is CUDA 12.4.
    return number // 1000, number % 1000 // 10
