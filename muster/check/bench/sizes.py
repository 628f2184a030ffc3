"""How large the messages are: what `--min-size`, `--max-size` and `--factor` stand for."""

import re

from muster.errors import MusterError

ELEMENT = 4
"""Bytes of a float32, of which all messages consist."""

LARGEST = {"gloo": "64M", "nccl": "1G"}
"""Where `--max-size` is not given: on CPUs larger messages take long and tell nothing new."""

MEBI = 1 << 20

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse(text: str, name: str) -> int:
    """The bytes that `text` (`1K`, `4M`, `4MiB`, `1048576`) stands for; `name` is the option that it is from.

    Raises:
        MusterError: it stands for none, or for less than one element.
    """
    found = re.fullmatch(r"(\d{1,15})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if size < ELEMENT:
        raise MusterError(
            f"{name} is not a size" if not found else f"{name} is less than one number of {ELEMENT} bytes",
            seen=f"{name}={text}",
            fix=f"{name}=1M; K, M and G are powers of 1024, a plain number is bytes",
        )
    return size


def sweep(least: str, most: str | None, factor: int, backend: str) -> tuple[int, ...]:
    """The sizes in bytes from `least` to `most`, each `factor` times the one before.

    Raises:
        MusterError: one of them is no size, or `least` is more than `most`.
    """
    size, end = parse(least, "--min-size"), parse(most or LARGEST[backend], "--max-size")
    if size > end:
        raise MusterError(
            "the smallest message is larger than the largest",
            seen=f"--min-size={least} --max-size={most or LARGEST[backend]}",
            fix=f"--min-size={most or LARGEST[backend]}, or less",
        )
    sizes: list[int] = []
    while size <= end:
        sizes.append(size)
        size *= factor
    return tuple(sizes)


def counts_of(size: int, num_parts: int) -> int:
    """How many elements each of `num_parts` equal parts of a message of about `size` bytes has; one at least."""
    return max(1, size // ELEMENT // num_parts)


def shown(size: int) -> str:
    """`size` bytes, in the largest unit that fits: 4K, 1.5M, 20."""
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor:
            return f"{size / factor:.4g}{unit}"
    return "0"
