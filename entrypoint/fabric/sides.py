"""Whose a library is, whatever the host has: the image's, or the driver's."""

import re
from pathlib import PurePosixPath

_OF_LIBC = r"libc|libm|libmvec|libpthread|libdl|librt|libutil|libresolv|libanl|libnsl|libthread_db|libBrokenLocale"
# One C library and one C++ runtime in a process; and NCCL is the wheel's, which torch was built with.
_IMAGES = re.compile(rf"(({_OF_LIBC}|libstdc\+\+|libgcc_s|libnccl)\.so(\.[0-9.]+)?|libnss_.*|ld-linux.*|ld64?\.so.*)")
_DRIVERS = re.compile(r"(libcuda|libnvidia-[^/]+|libnvcuvid|libcudadebugger)\.so(\.[0-9.]+)?")
# libnsl.so.2 and later are a project of their own.
_OWN_PROJECTS = re.compile(r"libnsl\.so\.[2-9]")


def is_images(soname: str) -> bool:
    """Whether a library comes from the image alone: the C library's family, compilers' runtimes, NCCL."""
    return bool(_IMAGES.fullmatch(soname)) and not _OWN_PROJECTS.fullmatch(soname)


def is_cudas(soname: str) -> bool:
    """Whether a library is CUDA's runtime: torch loads the image's; of another version, both can be loaded."""
    return soname.startswith("libcudart.so")


def is_drivers(soname: str) -> bool:
    """Whether a library comes with NVIDIA's driver, which the container's engine puts in place (--nv, --gpus)."""
    return bool(_DRIVERS.fullmatch(soname))


def is_kept(soname: str) -> bool:
    """Whether a library never comes from the host."""
    return is_images(soname) or is_drivers(soname)


def is_optional(user: str) -> bool:
    """Whether a file of the image is opened by NVSHMEM alone, when it is told to: nothing else ends if it can't be."""
    return PurePosixPath(user).name.startswith(("nvshmem_transport_", "nvshmem_bootstrap_"))
