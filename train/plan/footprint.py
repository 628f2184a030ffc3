"""What a micro-batch holds in memory, counted while the real model computes on tensors without content.

Every operation runs in torch's FakeTensorMode, which makes shapes, types and storages but no memory: a model of any
size is through in a moment, and the bytes that are alive are those that would be.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.models import gpt


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes that one micro-batch holds beside weights and their gradients.

    Attributes:
        forward: the most until the loss is known.
        backward: the most from then on.
        kept: what is held between the two.
        copies: of these, weights in the precision of the autocast.
    """

    forward: int
    backward: int
    kept: int
    copies: int

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(self.forward, self.backward)


def extend(one: Footprint, two: Footprint, number: float) -> Footprint:
    """The footprint of `number` equal parts, where `one` is that of one part and `two` that of two."""
    values = {field.name: (getattr(one, field.name), getattr(two, field.name)) for field in fields(Footprint)}
    return Footprint(
        **{name: round(first + (second - first) * (number - 1)) for name, (first, second) in values.items()}
    )


def local(tensor: Tensor) -> Tensor:
    """What this rank has of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def key_of(tensor: Tensor) -> int:
    """The identity of the memory of `tensor`, which views share."""
    return local(tensor).untyped_storage()._cdata


class Live(TorchDispatchMode):
    """Counts the bytes that operations have made and that are alive, without those of weights and gradients.

    Attributes:
        now: bytes alive.
        peak: the most there were.
        copies: of those alive, copies of weights in another type.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = self.copies = 0
        self.sizes: dict[int, int] = {}
        self.of_copies: set[int] = set()
        self.weights = {key_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.leave_out_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with the tensors inside
        results = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and key_of(args[0]) in self.weights
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self.count(result, is_cast)
        return results

    def count(self, tensor: Tensor, is_copy: bool) -> None:
        """Adds the memory of `tensor` until it is let go, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or key in self.weights:
            return
        self.sizes[key] = storage.nbytes()
        weakref.finalize(storage, self.let_go, key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        if is_copy:
            self.of_copies.add(key)
            self.copies += storage.nbytes()

    def let_go(self, key: int) -> None:
        """Takes out what is no longer alive."""
        size = self.sizes.pop(key)
        self.now -= size
        if key in self.of_copies:
            self.of_copies.remove(key)
            self.copies -= size

    def leave_out_gradient(self, parameter: Tensor) -> None:
        """Takes out a weight's gradient, which is counted by its weight."""
        assert parameter.grad is not None
        key = key_of(parameter.grad)
        self.now -= self.sizes.get(key, 0)
        self.sizes[key] = 0


def measure(
    model: nn.Module, inputs: Callable[[], Tensor], loss_of: Callable[[Any], Tensor], *, bf16: bool
) -> Footprint:
    """The footprint of one micro-batch of `model`, forth and back.

    Args:
        inputs: makes them, so that they are counted.
        loss_of: from outputs; what is no single number is gone back from with a gradient as large.
    """
    live = Live(model)
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outputs = model(inputs())
            loss = loss_of(outputs)
            kept, copies = live.now, live.copies
        forward, live.peak = live.peak, live.now
        loss.backward(None if loss.dim() == 0 else torch.empty_like(loss))
    return Footprint(forward=forward, backward=live.peak, kept=kept, copies=copies)


class GpuNorm(torch.autograd.Function):
    """What is held by root mean square normalisation where one kernel does it: its input, and a number a token.

    On CPUs it is made of several operations, which keep more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def kernels_of(is_gpu: bool) -> Iterator[None]:
    """A context in which a transformer's layers hold what they hold on a GPU, if it is one."""
    plain = gpt.rms_norm
    if is_gpu:
        gpt.rms_norm = lambda x, shape, weight, eps: GpuNorm.apply(x, weight)  # type: ignore[assignment]
    try:
        yield
    finally:
        gpt.rms_norm = plain


@contextmanager
def group_of(size: int) -> Iterator[DeviceMesh | None]:
    """A mesh of `size` ranks of which this process plays the first, and nobody the others; None for one."""
    if size == 1:
        with nullcontext() as nothing:
            yield nothing
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()
