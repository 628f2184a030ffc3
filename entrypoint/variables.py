"""Reading a number or a list out of a variable, with an error that names the variable."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from entrypoint import hostlist
from train.errors import MusterError

T = TypeVar("T")


def number(env: Mapping[str, str], name: str, fix: str) -> int:
    """The value of the variable `name`, a whole number of 0 or more.

    Raises:
        MusterError: it is missing, empty or something else.
    """
    value = env.get(name)
    if value is None:
        raise MusterError(f"{name} is missing, though its companions are there", seen=f"no {name}", fix=fix)
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise MusterError(f"{name} is no number", seen=f"{name}={value}", fix=fix)
    return int(value)


def hosts(env: Mapping[str, str], name: str, fix: str) -> tuple[str, ...]:
    """The hosts in the variable `name`, in their order.

    Raises:
        MusterError: it is missing, empty, or no host list.
    """
    return _expanded(env, name, fix, "a host list", hostlist.expand)


def counts(env: Mapping[str, str], name: str, fix: str) -> tuple[int, ...]:
    """The counts in the variable `name`, one a node.

    Raises:
        MusterError: it is missing, empty, or no list of counts.
    """
    return _expanded(env, name, fix, "a list of counts", hostlist.expand_counts)


def _expanded(env: Mapping[str, str], name: str, fix: str, kind: str, expand: Callable[[str], T]) -> T:
    value = env.get(name)
    if value is None:
        raise MusterError(f"{name} is missing, though its companions are there", seen=f"no {name}", fix=fix)
    try:
        return expand(value)
    except hostlist.HostListError as reason:
        raise MusterError(f"{name} can't be read as {kind}: {reason}", seen=f"{name}={value[:200]}", fix=fix) from None
