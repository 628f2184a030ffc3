"""Reading a number, a list or a file out of a variable, with an error that names the variable."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from muster.entrypoint import container, hostlist
from muster.entrypoint.environment import Environment
from muster.errors import MusterError
from muster.units import MAX_COUNT, MAX_ID, whole_number

T = TypeVar("T")

MAX_FILE_BYTES = 64 << 20
"""A list of hosts is smaller; a variable may name any file."""


def number(env: Mapping[str, str], name: str, fix: str, most: int = MAX_COUNT) -> int:
    """The value of the variable `name`, a whole number from 0 to `most`.

    Raises:
        MusterError: it is missing, empty or something else.
    """
    value = env.get(name)
    if value is None:
        raise _missing(env, name, fix)
    found = whole_number(value, most)
    if found is None:
        wrong = f"{name} is no number from 0 to {most}"
        raise MusterError(wrong, seen=seen(env, name), fix=fix)
    return found


def identifier(env: Mapping[str, str], name: str, fix: str) -> int:
    """As `number`, for the number by which a scheduler calls a job or a step."""
    return number(env, name, fix, MAX_ID)


def hosts(env: Mapping[str, str], name: str, fix: str) -> tuple[str, ...]:
    """The hosts in the variable `name`, in their order; a MusterError where it is missing, or no host list."""
    return _expanded(env, name, fix, "a host list", hostlist.expand)


def counts(env: Mapping[str, str], name: str, fix: str) -> tuple[int, ...]:
    """The counts in the variable `name`, one a node; a MusterError where it is missing, or no list of counts."""
    return _expanded(env, name, fix, "a list of counts", hostlist.expand_counts)


def optional(env: Mapping[str, str], name: str, fix: str) -> int | None:
    """As `number`, or None without the variable."""
    return number(env, name, fix) if name in env else None


def seen(env: Mapping[str, str], *names: str) -> str:
    """`NAME=VALUE` for each of `names` that there is."""
    return " ".join(f"{name}={env[name][:200]}" for name in names if name in env)


def own_index(hosts: tuple[str, ...], env: Environment, source: str, fix: str) -> int | None:
    """The place of this process's host in `hosts`, or None where it is not among them.

    Raises:
        MusterError: it could be several of them.
    """
    try:
        return hostlist.index_of(hosts, env.host)
    except hostlist.HostListError as reason:
        raise MusterError(f"which of the nodes this one is can't be told: {reason}", seen=source, fix=fix) from None


def text_file(env: Environment, name: str, fix: str) -> str:
    """The content of the file that the variable `name` names.

    Raises:
        MusterError: it can't be seen from here, with the options that show it to a container, or `fix`.
    """
    return _file(env, name, fix, bytes.decode, str)


def binary_file(env: Environment, name: str, fix: str) -> bytes:
    """The same, not decoded; in a recording it is written in hexadecimal digits."""
    return _file(env, name, fix, bytes, bytes.fromhex)


def _file(env: Environment, name: str, fix: str, of_live: Callable[[bytes], T], of_recorded: Callable[[str], T]) -> T:
    try:
        if not env.is_live:
            if name not in env.files:
                raise OSError("it is not in the recording")
            return of_recorded(env.files[name])
        path = Path(env[name])
        if not path.is_file():
            raise OSError("no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise OSError(f"larger than {MAX_FILE_BYTES} bytes")
        return of_live(path.read_bytes())
    except (OSError, ValueError) as reason:
        raise MusterError(
            f"the file that {name} names can't be read here: {reason}",
            seen=f"{name}={env[name][:400]}",
            fix=f"{container.bind(env.engine, shlex.quote(env[name]))}; or {fix}",
        ) from None


def _missing(env: Mapping[str, str], name: str, fix: str) -> MusterError:
    # A container may have been given some of the variables, by name.
    if isinstance(env, Environment) and env.engine in ("apptainer", "docker", "podman"):
        fix = f"{container.way_in(env.engine)}; or {fix}"
    return MusterError(f"{name} is missing, though its companions are there", seen=f"no {name}", fix=fix)


def _expanded(env: Mapping[str, str], name: str, fix: str, kind: str, expand: Callable[[str], T]) -> T:
    value = env.get(name)
    if value is None:
        raise _missing(env, name, fix)
    try:
        return expand(value)
    except hostlist.HostListError as reason:
        raise MusterError(f"{name} can't be read as {kind}: {reason}", seen=f"{name}={value[:200]}", fix=fix) from None
