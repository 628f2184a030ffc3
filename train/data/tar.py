"""The members of a tar file, by reading its headers only: where each one's bytes lie."""

import os
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
WINDOW = 4096
"""Bytes that are read at once: a small member, and the header of the next, come with the header before."""

MOST_DIGITS = 18
"""Of a number that anybody means; of thousands of digits Python makes none."""

FILE, LONG_NAME, LONG_LINK, PAX, PAX_FOR_ALL = (b"0", b"\0", b"7"), b"L", b"K", b"x", b"g"


class Broken(Exception):
    """A tar file that is none, or not the whole of one."""


class Member(NamedTuple):
    """A regular file in a tar file."""

    name: str
    offset: int
    size: int


class Reader:
    """The bytes of a file, of which a window is kept."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.start, self.window = 0, b""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer at the end of the file."""
        begin = offset - self.start
        if begin < 0 or begin + size > len(self.window):
            self.window, self.start, begin = os.pread(self.descriptor, max(size, WINDOW), offset), offset, 0
        return self.window[begin : begin + size]


def members(reader: Reader) -> Iterator[Member]:
    """The regular files in a tar file: POSIX, GNU, and pax formats.

    Raises:
        Broken: it is no tar file, it is damaged, or its end is missing.
    """
    end = os.fstat(reader.descriptor).st_size
    offset, long_name, long_size = 0, None, None
    while True:
        header = reader.read(offset, BLOCK)
        if len(header) < BLOCK:
            raise Broken(f"it ends at byte {end} without the mark of its end: a copy that was cut off?")
        if not header.strip(b"\0"):
            return
        size, kind = size_of(header, offset), header[156:157]
        begin = offset + BLOCK
        if kind in FILE and long_size is not None:
            size = long_size
        offset = begin + -(-size // BLOCK) * BLOCK
        if begin + size > end:
            name = long_name or name_of(header)
            raise Broken(f"{name} is cut off: it should reach to byte {begin + size}, and the file ends at {end}")
        if kind in (LONG_NAME, PAX):
            content = reader.read(begin, size)
            if kind == LONG_NAME:
                long_name = content.rstrip(b"\0").decode(errors="surrogateescape")
            else:
                fields = pax_fields(content)
                long_name = fields.get("path", long_name)
                told = fields.get("size", "0")
                if not (told.isdecimal() and len(told) <= MOST_DIGITS):
                    raise Broken(f"a pax header has no size: {told[:40]!r}")
                long_size = int(told) if "size" in fields else None
            continue
        if kind in (LONG_LINK, PAX_FOR_ALL):
            continue
        if kind in FILE:
            yield Member(long_name or name_of(header), begin, size)
        long_name, long_size = None, None


def size_of(header: bytes, offset: int) -> int:
    """The size in a header, whose checksum is right.

    Raises:
        Broken: it is not.
    """
    try:
        wanted = int(header[148:156].strip(b" \0") or b"x", 8)
        # GNU writes sizes that eight octal digits can't say as a number in base 256.
        size = int.from_bytes(header[125:136]) if header[124] & 0x80 else int(header[124:136].strip(b" \0") or b"0", 8)
    except ValueError:
        wanted, size = -1, 0
    if sum(header) - sum(header[148:156]) + 8 * 32 != wanted:
        raise Broken(f"byte {offset} begins no header of a tar file")
    return size


def name_of(header: bytes) -> str:
    """The name in a header, as far as it has room there."""
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode(errors="surrogateescape")


def pax_fields(content: bytes) -> dict[str, str]:
    """The fields in a pax header: lines such as `28 path=a/long/name.jpg`.

    Raises:
        Broken: they are none.
    """
    fields: dict[str, str] = {}
    while content.strip(b"\0"):
        length, _, _ = content.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(content):
            raise Broken("a pax header can't be read")
        name, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        fields[name.decode(errors="surrogateescape")] = value.decode(errors="surrogateescape")
        content = content[int(length) :]
    return fields
