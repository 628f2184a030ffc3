"""What the NVIDIA driver's library answers: which CUDA it supports, and whether it works on the GPUs here.

Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VERSION.html
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from train.errors import MusterError

Version = tuple[int, int]

NAME = "libcuda.so.1"
TIMEOUT_S = 60.0

# The answers of cuInit that a user can do something about.
ERRORS = {
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


@dataclass(frozen=True)
class Answer:
    """What a library said of itself in a process of its own.

    Attributes:
        code: what cuInit returned: 0 where it works on this node's GPUs; None where it could not be asked.
        cuda: the newest CUDA that it supports.
        problem: why it could not be asked.
    """

    code: int | None
    cuda: Version
    problem: str = ""

    def works_for(self, major: int) -> bool:
        """Whether what is built for CUDA `major` runs with it here."""
        return self.code == 0 and self.cuda[0] >= major

    def __str__(self) -> str:
        if self.code is None:
            return self.problem
        if self.code == 0:
            return f"it supports CUDA {written(self.cuda)}"
        return f"cuInit answers {ERRORS.get(self.code, 'a CUDA error')} ({self.code})"


def written(version: Version) -> str:
    """`version` as NVIDIA writes it: 12.4."""
    return f"{version[0]}.{version[1]}"


def supported() -> Version | str:
    """The newest CUDA that the libcuda.so.1 of this process supports, or why that can't be told.

    The question touches no GPU, so it is quick.
    """
    # Here and not above: most launches have no GPU.
    import ctypes

    version = ctypes.c_int()
    try:
        code = ctypes.CDLL(NAME).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as reason:
        return str(reason)
    return f"cuDriverGetVersion answers {ERRORS.get(code, 'a CUDA error')} ({code})" if code else _split(version.value)


def prove(library: str, env: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Answer:
    """What `library` answers when it is put to work on this node's GPUs, in a process with the variables `env`.

    Raises:
        MusterError: it takes longer than `timeout_s`.
    """
    command = [sys.executable, "-I", "-S", "-c", PROBE, library]
    try:
        done = subprocess.run(
            command, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MusterError(
            f"the NVIDIA driver does not answer: cuInit took longer than {timeout_s:g} s",
            seen=library,
            fix="look at this node's GPUs with nvidia-smi, or leave the node out",
        ) from None
    except OSError as reason:
        return Answer(None, (0, 0), str(reason))
    # The last line: a library may have said something before.
    words = (done.stdout.splitlines() or [""])[-1].split()
    if done.returncode == 0 and len(words) == 3 and words[0] == "answer":
        return Answer(int(words[1]), _split(int(words[2])))
    said = done.stderr.strip().splitlines() or [f"it ended a process with code {done.returncode}"]
    return Answer(None, (0, 0), said[-1])


def _split(number: int) -> Version:
    # 12040 is CUDA 12.4.
    return number // 1000, number % 1000 // 10
