"""Shared objects compiled for a test, which stand in for NVIDIA's libraries where there is no GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

LIBCUDA = """
#include <signal.h>
#include <unistd.h>
int cuInit(unsigned flags) {{ {before}; return {code}; }}
int cuDriverGetVersion(int *version) {{ *version = {cuda}; return 0; }}
"""

LIBNCCL = "int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}"


def compiled(source: str, path: Path, *options: str) -> Path:
    """Compiles the C `source` to the shared object `path`; without gcc skips the test, or with CI=true fails it."""
    if shutil.which("gcc") is None:
        missing = "needs gcc, of the Debian packages gcc and libc6-dev"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True, timeout=240)
    return path


def libcuda(folder: Path, cuda: int, code: int = 0, before: str = "", name: str = "libcuda.so.1") -> Path:
    """A libcuda that supports `cuda` (12040 for 12.4), and whose cuInit returns `code` after the statement `before`."""
    return compiled(LIBCUDA.format(cuda=cuda, code=code, before=before), folder / name)


def libnccl(path: Path, version: int, *options: str) -> Path:
    """An NCCL whose only function returns its `version` (21905 for 2.19.5)."""
    return compiled(LIBNCCL.format(version=version), path, *options)
