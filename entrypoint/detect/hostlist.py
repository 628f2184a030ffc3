"""Numbers and lists of hosts, as schedulers write them. Compressed lists are expanded without `scontrol`:

    gpu-a[1-2],gpu-b7,rack10n[008-009]   ->  gpu-a1 gpu-a2 gpu-b7 rack10n008 rack10n009
    r[0-1]_b[0-1]                        ->  r0_b0 r0_b1 r1_b0 r1_b1
    n[1-2]-ib                            ->  n1-ib n2-ib

Order is kept, and a repeated host counts once, where it comes first: node rank I is the I-th host.
Why this is not a library: docs/decisions/hostlists.md.
"""

import re
from functools import lru_cache
from itertools import product
from math import prod

MAX_COUNT = 1_000_000
"""The largest count that is accepted: nodes of a job, processes of a node, restarts."""
MAX_ID = 10**18 - 1
"""The largest number that is accepted as the id of a job or a step."""
MAX_HOSTS = 200_000
# The kernel starts no program with a longer variable: 32 pages, and pages have up to 64 KiB.
MAX_TEXT = 2 << 20


def whole_number(text: str, most: int = MAX_COUNT) -> int | None:
    """The number from 0 to `most` that `text` gives in ASCII digits, or None where it is something else.

    Python's `int` accepts signs, blanks and the digits of other scripts too, and raises ValueError for 5,000 digits.
    The limit is needed because callers make lists of this length.
    """
    number = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
    return number if number is not None and number <= most else None


class HostListError(ValueError):
    """A host list that can't be read; the message says which part of it."""


# Slurm gives the same list in several variables, and several callers look this host up: in a job of 10,000 nodes each
# expansion takes noticeable time.
@lru_cache(maxsize=8)
def expand(text: str) -> tuple[str, ...]:
    """The hosts that `text` names, in its order, each once.

    Raises:
        HostListError: unbalanced or nested brackets, an invalid range or host name, or too many hosts.
    """
    if len(text) > MAX_TEXT:
        raise HostListError(f"it has {len(text)} characters")
    hosts: dict[str, None] = {}
    num_hosts = 0
    for item in _split(text):
        found = _expand_item(item)
        hosts.update(dict.fromkeys(found))
        num_hosts += len(found)
        if num_hosts > MAX_HOSTS:
            raise HostListError(f"it stands for more than {MAX_HOSTS} hosts")
    return tuple(hosts)


def is_name(text: str) -> bool:
    """Whether `text` can be the name of a host."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*", text) is not None


def is_address(text: str) -> bool:
    """Whether `text` is an address rather than a name."""
    return ":" in text or re.fullmatch(r"[0-9]+(\.[0-9]+){3}", text) is not None


def short(host: str) -> str:
    """`host` without its domain, in lower case; an address as it is."""
    name = host.lower()
    first, dot, _ = name.partition(".")
    return name if ":" in name or (dot and first.isdecimal()) else first


@lru_cache(maxsize=8)
def index_of(hosts: tuple[str, ...], host: str | None) -> int | None:
    """The index of `host` in `hosts`, without regard to domain and case; None where it is not among them.

    Raises:
        HostListError: `host` could be several of them.
    """
    if host is None:
        return None
    if host in hosts:
        return hosts.index(host)
    name = short(host)
    places = [place for place, other in enumerate(hosts) if short(other) == name]
    if len(places) > 1:
        raise HostListError(f"{host} could be {hosts[places[0]]} or {hosts[places[1]]}")
    return places[0] if places else None


def _split(text: str) -> list[str]:
    # Commas inside brackets separate ranges, the others separate hosts.
    item = r"(?:[^,\[\]]++|\[[^\[\]]*+\])*+"
    if not re.fullmatch(f"{item}(?:,{item})*", text):
        raise HostListError("its brackets don't match")
    return re.findall(f"(?:^|,)({item})", text)


def _expand_item(item: str) -> list[str]:
    # "r[0-1]_b[0-1]" -> ["r", "0-1", "_b", "0-1", ""]: literals at even places, ranges at odd ones.
    choices = [_expand_ranges(part) if index % 2 else [part] for index, part in enumerate(re.split(r"[\[\]]", item))]
    if prod(map(len, choices)) > MAX_HOSTS:
        raise HostListError(f"{item[:60]!r} stands for more than {MAX_HOSTS} hosts")
    hosts = ["".join(combination) for combination in product(*choices)]
    # Ranges only put digits in: if the first name is well formed, so are the others.
    if not is_name(hosts[0]):
        raise HostListError(f"{item[:60]!r} is no host name")
    return hosts


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for piece in text.split(","):
        match = re.fullmatch(r"([0-9]{1,12})(?:-([0-9]{1,12}))?", piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not 0 <= last - first < MAX_HOSTS - len(numbers):
            raise HostListError(f"[{text[:60]}] holds {piece[:60]!r}, which is no number or range, or is too large")
        # Leading zeros set the least number of digits: three in 008-011, one in 8-11.
        numbers.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers that Slurm's `2(x3),1` stands for: (2, 2, 2, 1).

    Raises:
        HostListError: `text` holds something other than counts and repetitions, or too many.
    """
    if len(text) > MAX_TEXT:
        raise HostListError(f"it has {len(text)} characters")
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", piece.strip())
        count, repeat = (whole_number(match[1]), whole_number(match[2] or "1")) if match else (None, None)
        if count is None or repeat is None:
            raise HostListError(f"{piece[:60]!r} is no count")
        if len(counts) + repeat > MAX_HOSTS:
            raise HostListError(f"{piece[:60]!r} repeats too often")
        counts.extend([count] * repeat)
    return tuple(counts)
