"""Data parallel by threads: nn.DataParallel, in one process over all of its GPUs. For comparison: ddp is faster.

Each step copies the model to every GPU and the outputs back to the first, and one interpreter serves all of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from muster.train.models import place
from muster.train.optim import Precision
from muster.train.parallel.strategy import Strategy


class DP(Strategy):
    """One process drives all of its GPUs by threads."""

    def notes(self) -> list[str]:
        return ["dp is for comparison: 'train ddp' does the same with a process for each GPU, and faster"]

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model` with copies on all GPUs of this process; on the CPU, as it is."""
        model = place(model, self.world.device, precision.layout, self.options.seed)
        if self.world.device.type == "cpu":
            return model
        return nn.DataParallel(Autocast(model, precision), device_ids=list(range(torch.cuda.device_count())))

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("module.module") if isinstance(model, nn.DataParallel) else model


class Autocast(nn.Module):
    """Runs `module` in the chosen precision, in whichever thread it is called.

    nn.DataParallel calls its copies in threads of their own. There autocast is on where it is on in the main thread,
    but the data type is torch's default for GPUs: fp16, whose gradients need a scaler that this trainer does not have.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self.precision = precision

    def forward(self, inputs: Tensor) -> Any:
        with self.precision.autocast(inputs.device):
            return self.module(inputs)
