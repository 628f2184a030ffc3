"""The next batch goes to the GPU while the step computes: on a stream of its own."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Tensors = tuple[torch.Tensor, torch.Tensor]


class SideStream:
    """A second queue of work on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[Item], Tensors | None], item: Item) -> tuple[Tensors | None, Any]:
        """What `work` of `item`, queued on this stream, will have computed, and the event that tells when it has."""
        with torch.cuda.stream(self.stream):
            return work(item), self.stream.record_event()

    def hand_over(self, tensors: Tensors | None, done: Any) -> Tensors | None:
        """`tensors`, for which the GPU's main queue waits; the host does not."""
        if tensors is None:
            return None
        main = torch.cuda.current_stream(self.device)
        main.wait_event(done)
        for tensor in tensors:
            # They came from this stream's memory: it must not be given away before the main queue is done with them.
            tensor.record_stream(main)
        return tensors


def ahead(
    items: Iterable[Item], prepare: Callable[[Item], Tensors | None], side: SideStream
) -> Iterator[tuple[Item, Tensors | None]]:
    """Each of `items`, and what `prepare` makes of it on the side stream while the one before is computed with."""
    waiting: tuple[Item, Tensors | None, Any] | None = None
    for item in items:
        following = (item, *side.run(prepare, item))
        if waiting is not None:
            yield waiting[0], side.hand_over(*waiting[1:])
        waiting = following
    if waiting is not None:
        yield waiting[0], side.hand_over(*waiting[1:])
