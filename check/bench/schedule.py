"""Which pairs of nodes are measured, and when: in a round, no node is in two of them."""

from collections.abc import Sequence

from check.doctor.peers import ALL_PAIRS_UP_TO, targets

Pair = tuple[int, int]


def rounds(num_nodes: int) -> list[list[Pair]]:
    """All that are measured, as rounds: in each, no node is in two pairs.

    Where all meet all it is the round-robin tournament by the circle method. Of more nodes, node i meets i + 1, i + 2,
    i + 4, ...: so each is in about 2 log n pairs with different others.
    """
    if num_nodes <= ALL_PAIRS_UP_TO:
        return _circle(num_nodes)
    pairs = dict.fromkeys(_pair(node, other) for node in range(num_nodes) for other in targets(node, num_nodes))
    return _in_rounds(list(pairs))


def _circle(num_nodes: int) -> list[list[Pair]]:
    """One node stays, the others go round; where the number is odd, the one that meets nobody rests."""
    places = num_nodes + num_nodes % 2
    ring = list(range(1, places))
    result: list[list[Pair]] = []
    for _ in range(places - 1):
        seats = [0, *ring]
        met = [_pair(seats[seat], seats[-1 - seat]) for seat in range(places // 2)]
        result.append([pair for pair in met if pair[1] < num_nodes])
        ring = [ring[-1], *ring[:-1]]
    return result if num_nodes > 1 else []


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _in_rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """`pairs`, each in the first round where both have time."""
    result: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in pairs:
        number = next((number for number, nodes in enumerate(busy) if not nodes & set(pair)), len(busy))
        if number == len(busy):
            result.append([])
            busy.append(set())
        result[number].append(pair)
        busy[number] |= set(pair)
    return result
