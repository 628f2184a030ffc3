"""What a trainer has loaded of the image as NCCL opens its plugin: torch's own libraries, by their folders in wheels.

The loader does not look in those folders, but gives to a plugin that needs libcudart.so.13 the one that is loaded.
"""

from collections.abc import Iterable
from pathlib import Path

from entrypoint.fabric import elf, inventory
from entrypoint.fabric.inventory import Inventory
from entrypoint.fabric.sides import is_kept

TORCH = "libtorch_cuda.so"


def needed_by(libraries: Iterable[Path]) -> tuple[str, ...]:
    """The paths of the libraries in wheels that torch loads, and that one of `libraries` needs and none of them is."""
    files = list(libraries)
    needed = {name: None for file in files if (read := elf.read(file)) for name in read.needed}
    own = {file.name for file in files}
    names = [name for name in needed if name not in own and not is_kept(name)]
    image = inventory.load() if names else None
    torch = image.libraries.get(TORCH) if image else None
    if image is None or torch is None:
        return ()
    # What the loader finds by itself is left to it.
    packages = Path(torch.path).parents[2]
    in_wheels = [
        name for name in names if name in image.libraries and Path(image.libraries[name].path).is_relative_to(packages)
    ]
    loaded = _of_torch(image) if in_wheels else frozenset[str]()
    return tuple(image.libraries[name].path for name in in_wheels if name in loaded)


def _of_torch(image: Inventory) -> frozenset[str]:
    """The sonames of what torch itself needs for NVIDIA's GPUs, and of what that needs."""
    found: set[str] = set()
    names = [TORCH]
    while names:
        name = names.pop()
        if name in found or name not in image.libraries or is_kept(name):
            continue
        found.add(name)
        read = elf.read(Path(image.libraries[name].path))
        names += read.needed if read else ()
    return frozenset(found)
