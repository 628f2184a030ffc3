"""Shared objects made for a test: what stands in for NVIDIA's libraries where there is no GPU."""

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
    """`path`, a shared object made of the C `source`; skips the test without gcc, with CI=true fails it."""
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
    """A libcuda that supports `cuda` (12040 for 12.4), and whose cuInit answers `code` after the statement `before`."""
    return compiled(LIBCUDA.format(cuda=cuda, code=code, before=before), folder / name)


def libnccl(path: Path, version: int, *options: str) -> Path:
    """An NCCL that can do nothing but tell its `version` (21905 for 2.19.5)."""
    return compiled(LIBNCCL.format(version=version), path, *options)
