"""A model to be trained, and what it and its parts hold in memory while they compute."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from train import models, optimizer
from train.models import gpt, loss_of, units_of
from train.options import Options
from train.parallel.shards import has_statistics
from train.plan.footprint import Footprint, extend, group_of, kernels_of, measure
from train.precision import has_bf16
from train.strategies import tp


class Subject:
    """A model to train, and what parts of it hold.

    Args:
        options: settled.
        is_gpu: whether kernels and precision are those of a GPU.

    Raises:
        MusterError: there is no such model.
    """

    def __init__(self, options: Options, *, is_gpu: bool) -> None:
        self.options = options
        self.is_gpu = is_gpu
        self.bf16 = options.bf16 if options.bf16 is not None else is_gpu or has_bf16(torch.device("cpu"))
        self.shape = gpt.shape_of(options.model) if options.predicts_tokens else None
        self.num_classes, self.size = data_of(options)
        with torch.device("meta"):
            self.model = model = models.build(options, self.num_classes, self.size)
        self.num_weights = count(model.parameters())
        self.num_norms = count(weight for weight in model.parameters() if weight.dim() == 1)
        units = [count(unit.parameters()) for unit in units_of(model)]
        self.largest_unit = max(units, default=0)
        self.root = self.num_weights - sum(units)
        self.low = self.bf16 and not has_statistics(model)
        self.moment = bytes_of_moments(options)
        self.average = 4 if options.ema is not None else 0  # bytes of a weight's moving average
        self.footprint = cache(self._footprint)
        self.stage = cache(self._stage)

    def _footprint(self, batch: int, recompute: str, tensor: int, low: bool) -> Footprint:
        """One micro-batch of the whole model, on one of `tensor` ranks; `low` with its weights in bf16."""
        if self.shape is None:
            model = deepcopy(self.model)
            with without_content(self.is_gpu), of_type(torch.bfloat16 if low else torch.float32):
                give_memory(model)
                return self._measured(model, batch)
        found = []
        for num_layers in (1, 2):
            with group_of(tensor) as mesh, without_content(self.is_gpu):
                # A model is cut before it has memory: then nothing need be sent to the others, who are not there.
                model = self._layers(num_layers, recompute, low, "cpu" if mesh is None else "meta")
                if mesh is not None:
                    tp.cut(model, mesh)
                    model.to_empty(device="cpu")
                found.append(self._measured(model, batch))
        return extend(found[0], found[1], self.shape.num_layers)

    def _stage(self, batch: int, recompute: str, num_layers: int, first: bool, last: bool) -> Footprint:
        """One micro-batch of `num_layers` layers in a line of ranks."""
        found = []
        for number in (1, 2):
            with without_content(self.is_gpu):
                model = self._layers(number, recompute, False, "cpu")
                gpt.keep(model, [gpt.Stage(layers=range(number), first=first, last=last)])
                found.append(self._measured(model, batch))
        return extend(found[0], found[1], num_layers)

    def _layers(self, num_layers: int, recompute: str, low: bool, device: str) -> gpt.GPT:
        assert self.shape is not None
        with torch.device(device), of_type(torch.bfloat16 if low else torch.float32):
            return gpt.GPT(replace(self.shape, num_layers=num_layers), self.num_classes, recompute)

    def _measured(self, model: nn.Module, batch: int) -> Footprint:
        targets = torch.zeros(batch, dtype=torch.int64)

        def images_NCHW() -> Tensor:
            of_images = torch.empty(batch, 3, self.size, self.size, dtype=next(model.parameters()).dtype)
            layout = torch.channels_last if self.options.channels_last else torch.contiguous_format
            return of_images.contiguous(memory_format=layout)

        if not isinstance(model, gpt.GPT):
            return measure(model, images_NCHW, lambda outputs: loss_of(outputs, targets), bf16=self.bf16)
        targets = torch.zeros(batch, self.size, dtype=torch.int64)
        dim = model.shape.dim

        def tokens_or_stream() -> Tensor:
            if model.embed is not None:
                return torch.zeros(batch, self.size, dtype=torch.int64)
            return torch.empty(batch, self.size, dim, requires_grad=True)

        def loss(outputs: Tensor) -> Tensor:
            return outputs if model.output is None else loss_of(outputs, targets)

        return measure(model, tokens_or_stream, loss, bf16=self.bf16)


@contextmanager
def without_content(is_gpu: bool) -> Iterator[None]:
    """A context in which tensors have no content."""
    gpt.rotation.cache_clear()  # of tensors with content, and at the end of those without
    try:
        with FakeTensorMode(), kernels_of(is_gpu):
            yield
    finally:
        gpt.rotation.cache_clear()


@contextmanager
def of_type(dtype: torch.dtype) -> Iterator[None]:
    """A context in which weights are made as `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def give_memory(model: nn.Module) -> None:
    """Puts weights and buffers of the default type into `model`, in place of those on the meta device."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(weight.shape)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            like = torch.get_default_dtype() if buffer.is_floating_point() else buffer.dtype
            setattr(module, name, torch.zeros(buffer.shape, dtype=like))


def count(weights: Iterable[Tensor]) -> int:
    """Numbers in `weights`."""
    return sum(weight.numel() for weight in weights)


def data_of(options: Options) -> tuple[int, int]:
    """How many classes or tokens, and how many pixels a side or tokens of a sequence: the data are not opened."""
    if options.predicts_tokens:
        shape = gpt.shape_of(options.model)
        return options.vocab_size or shape.vocab, options.seq_len or shape.context
    is_small = options.data.partition(":")[0] in ("digits", "cifar10")
    return 10 if is_small else options.num_classes, options.pixels


def bytes_of_moments(options: Options) -> float:
    """Bytes that the optimizer keeps of each weight."""
    with FakeTensorMode():
        model = nn.Linear(64, 64)
        steps = optimizer.build(options, model, fused=False)
        model(torch.zeros(1, 64)).sum().backward()
        steps.step()
        held = sum(
            value.numel() * value.element_size()
            for weight, state in steps.state.items()
            for value in state.values()
            if isinstance(value, Tensor) and value.shape == weight.shape
        )
        return held / count(model.parameters())
