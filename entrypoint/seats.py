"""What each process of a launch says of itself, and whether all of it together can be true.

Where no list names the hosts, a process knows its own host and its launcher's counts. It takes the rest for granted:
ranks in blocks, as many on each host. One alone can't see that this is wrong; all together can.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from train.errors import MusterError

FIX = "start as many on each host, each host's in one block: mpirun --map-by slot (Open MPI), mpiexec -ppn N (Hydra)"


@dataclass(frozen=True)
class Seat:
    """One process.

    Attributes:
        host: its host's name, for a person.
        machine: what tells that host from all others, also from those of the same name.
        node_rank: the number it takes its host to have.
        local_rank: its number on that host.
        tasks_on_node: how many it takes to be there.
        world: what it takes the launch to be, as an error says it: "2 nodes x 2 ranks".
    """

    host: str
    machine: str
    node_rank: int
    local_rank: int
    tasks_on_node: int
    world: str


def check(seats: Mapping[int, Seat]) -> None:
    """Returns if the processes, by number, describe one launch.

    Raises:
        MusterError: two of them contradict each other; the error names both.
    """
    nodes: dict[str, tuple[int, Seat]] = {}
    machines: dict[int, tuple[int, Seat]] = {}
    places: dict[tuple[int, int], tuple[int, Seat]] = {}
    for number, seat in sorted(seats.items()):
        if seat.world != seats[0].world:
            raise _refusal("the hosts run different numbers of processes", (0, seats[0]), (number, seat))
        first = nodes.setdefault(seat.machine, (number, seat))
        if first[1].node_rank != seat.node_rank:
            raise _refusal("the ranks of a host don't lie in one block", first, (number, seat))
        first = machines.setdefault(seat.node_rank, (number, seat))
        if first[1].machine != seat.machine:
            raise _refusal("two hosts take themselves for the same node", first, (number, seat))
        first = places.setdefault((seat.node_rank, seat.local_rank), (number, seat))
        if first[0] != number:
            raise _refusal("two processes have the same place", first, (number, seat))
    for number, seat in sorted(seats.items()):
        there = sum(other.machine == seat.machine for other in seats.values())
        if there != seat.tasks_on_node:
            raise MusterError(
                f"number {number} counts {seat.tasks_on_node} processes on {seat.host}, and there are {there}",
                seen=_described(number, seat),
                fix=FIX,
            )


def _refusal(wrong: str, one: tuple[int, Seat], other: tuple[int, Seat]) -> MusterError:
    return MusterError(wrong, seen=f"{_described(*one)}; {_described(*other)}", fix=FIX)


def _described(number: int, seat: Seat) -> str:
    return f"number {number} on {seat.host}: node {seat.node_rank}, local rank {seat.local_rank}, {seat.world}"
