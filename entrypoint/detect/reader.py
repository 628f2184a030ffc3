"""Reading a family's variables: numbers, lists and files, each with an error that names its variable.

A reader keeps `NAME=VALUE` as the source of each field that it reads: `muster detect` shows where a value came from.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from muster.entrypoint.detect import hostlist
from muster.entrypoint.environment import Environment
from muster.entrypoint.rendezvous import network
from muster.errors import MusterError

T = TypeVar("T")

MAX_FILE_BYTES = 64 << 20
"""The size of the largest file that is read: every list of hosts is smaller, but a variable may name any file."""


class Reader:
    """A reader of the variables of one job or task.

    Args:
        fix: the advice in its errors.

    Attributes:
        sources: for each field that was read, the variable it came from with its value.
    """

    def __init__(self, env: Environment, fix: str) -> None:
        self.env = env
        self.fix = fix
        self.sources: dict[str, str] = {}

    def number(self, name: str, field: str | None = None, *, most: int = hostlist.MAX_COUNT) -> int:
        """The value of `name`, a whole number from 0 to `most`.

        Raises:
            MusterError: it is missing, empty or something else.
        """
        if (found := hostlist.whole_number(self._value(name), most)) is None:
            raise self.error(f"{name} is no number from 0 to {most}", name)
        if field:
            self.sources[field] = f"{name}={self.env[name]}"
        return found

    def identifier(self, name: str, field: str | None = None) -> int:
        """The value of `name`, the id of a job or a step: a `number` up to MAX_ID."""
        return self.number(name, field, most=hostlist.MAX_ID)

    def optional(self, name: str, field: str | None = None) -> int | None:
        """The value of `name` as a `number`, or None where it is not set."""
        return self.number(name, field) if name in self.env else None

    def hosts(self, name: str, field: str | None = None) -> tuple[str, ...]:
        """The hosts in `name`, in their order; a MusterError where it is missing, or no host list."""
        return self._list(name, field, "a host list", hostlist.expand)

    def counts(self, name: str, field: str | None = None) -> tuple[int, ...]:
        """The counts in `name`, one a node; a MusterError where it is missing, or no list of counts."""
        return self._list(name, field, "a list of counts", hostlist.expand_counts)

    def text_file(self, name: str) -> str:
        """The content of the file that `name` names.

        Raises:
            MusterError: it can't be read here; the error's `fix` has the option that shows it to a container.
        """
        return self._file(name, bytes.decode, str)

    def binary_file(self, name: str) -> bytes:
        """The content of the file that `name` names, as bytes; a recording has them in hexadecimal digits."""
        return self._file(name, bytes, bytes.fromhex)

    def slots(self, pairs: Iterable[tuple[str, str]], wrong: str, *names: str) -> dict[str, int]:
        """The number of processes for each host in `pairs`, in the order of their first occurrence.

        Args:
            pairs: a host and a number of processes, as text; the numbers of a repeated host are added.
            wrong: the name of the list, with which an error begins.
            names: the variables that an error shows.

        Raises:
            MusterError: a pair has no valid host name or number, or there are no pairs.
        """
        slots: dict[str, int] = {}
        for host, count in pairs:
            number = hostlist.whole_number(count)
            if number is None or not hostlist.is_name(host):
                raise self.error(f"{wrong} holds {host[:60]!r} with {count[:20]!r} processes", *names)
            slots[host] = slots.get(host, 0) + number
        self.agree(bool(slots), f"{wrong} is empty", *names)
        return slots

    def own_index(self, hosts: tuple[str, ...], source: str) -> int | None:
        """The index of this host in `hosts`, or None where it is not among them.

        Args:
            hosts: the job's, in its order.
            source: where they came from, for the error.

        Raises:
            MusterError: this host could be several of them.
        """
        try:
            own = hostlist.index_of(hosts, self.env.host)
        except hostlist.HostListError as reason:
            wrong = f"this host's place among the nodes is unknown: {reason}"
            raise MusterError(wrong, seen=source, fix=self.fix) from None
        if own is None and self.env.is_live:
            own = next((i for i, host in enumerate(hosts) if hostlist.is_address(host) and network.is_own(host)), None)
        return own

    def cpus(self, slots: Mapping[str, int]) -> int | None:
        """The number of cores that this host's slots stand for; None for a single slot, which may be a whole node."""
        host = hostlist.short(self.env.host or "")
        own = sum(number for name, number in slots.items() if hostlist.short(name) == host)
        return own if own > 1 else None

    def check_inner_launcher(self, place: str) -> None:
        """Refuses a process that DeepSpeed's launcher or Ray started as one of several in this `place`, a pod or job.

        Source: https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/launcher/launch.py (LOCAL_SIZE)
        Source: https://github.com/ray-project/ray/blob/master/python/ray/train/torch/config.py (LOCAL_WORLD_SIZE)
        """
        of_one = {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        if any(self.env.get(name, "") not in ("", value) for name, value in of_one.items()):
            raise MusterError(
                f"a launcher inside this {place} has started this process as one of several",
                seen=self.seen("RANK", "WORLD_SIZE", *of_one),
                fix="start the command once on each node, without that launcher: it starts a process for each GPU "
                f"itself; or unset {' '.join(name for name in of_one if name in self.env)}, if left over",
            )

    def seen(self, *names: str) -> str:
        """`NAME=VALUE` for each of `names` that is set, with at most 200 characters of its value."""
        return " ".join(f"{name}={self.env[name][:200]}" for name in dict.fromkeys(names) if name in self.env)

    def agree(self, holds: bool, wrong: str, *names: str) -> None:
        """Raises a MusterError that shows the values of `names`, unless the condition `holds`."""
        if not holds:
            raise self.error(wrong, *names)

    def error(self, wrong: str, *names: str) -> MusterError:
        """The error that shows the values of `names`."""
        return MusterError(wrong, seen=self.seen(*names) or f"no {' '.join(names)}", fix=self.fix)

    def _value(self, name: str) -> str:
        if name in self.env:
            return self.env[name]
        fix = self.fix
        # The user may have passed only some of the variables into a container, by name.
        if self.env.engine in ("apptainer", "docker", "podman"):
            fix = f"{self.env.way_in()}; or, if it is but one node, --nnodes 1 --node-rank 0; or {fix}"
        raise MusterError(f"{name} is missing, but variables that go with it are set", seen=f"no {name}", fix=fix)

    def _list(self, name: str, field: str | None, kind: str, expand: Callable[[str], T]) -> T:
        try:
            found = expand(self._value(name))
        except hostlist.HostListError as reason:
            raise self.error(f"{name} can't be read as {kind}: {reason}", name) from None
        if field:
            self.sources[field] = f"{name}={self.env[name]}"
        return found

    def _file(self, name: str, of_live: Callable[[bytes], T], of_recorded: Callable[[str], T]) -> T:
        if not (path := self.env.get(name)):
            raise MusterError(f"{name} is not set, so the job's nodes are not known", seen=f"no {name}", fix=self.fix)
        try:
            if not self.env.is_live:
                if name not in self.env.files:
                    raise OSError("it is not in the recording")
                return of_recorded(self.env.files[name])
            if not Path(path).is_file():
                raise OSError("no such file")
            if Path(path).stat().st_size > MAX_FILE_BYTES:
                raise OSError(f"larger than {MAX_FILE_BYTES} bytes")
            return of_live(Path(path).read_bytes())
        except (OSError, ValueError) as reason:
            raise MusterError(
                f"the file that {name} names can't be read here: {reason}",
                seen=f"{name}={path[:400]}",
                fix=f"{self.env.bind_option(shlex.quote(path))}; or {self.fix}",
            ) from None


def slots_or_problem(find: Callable[[], dict[str, int]]) -> tuple[dict[str, int], MusterError | None]:
    """The number of processes by host that `find` returns, and None; or an empty dict, and the error that it raised.

    A task whose launcher gives ranks needs no list of hosts, so the error is raised only where the list is needed.
    """
    try:
        return find(), None
    except MusterError as problem:
        return {}, problem
