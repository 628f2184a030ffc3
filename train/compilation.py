"""Compiling the model: `--compile`.

Forward methods are compiled, and with them their backward passes, but no hooks (those of fsdp and tp). A transformer is
compiled layer by layer: its layers are alike, so one compilation serves all, and ddp gets the gradients of a layer as
soon as they are computed. The blocks of any sharded model are compiled in the same way. Any other model is compiled as
a whole; within ddp torch splits its graph where a bucket of gradients is full, to send it while the rest is computed.

Source: https://docs.pytorch.org/docs/stable/torch.compiler_faq.html (DistributedDataParallel, FullyShardedDataParallel)
"""

import logging
import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule

from muster.config import Options
from muster.errors import MusterError
from muster.train.models import blocks_of
from muster.train.models.gpt import GPT
from muster.train.parallel.strategy import Gradients

COMPILERS = {"cpu": ("CXX", ("g++",)), "cuda": ("CC", ("gcc", "clang"))}
"""By device: the variable that names the system compiler for torch, and the compilers tried where it is not set."""

NUM_SHAPES = 64
"""Limit on the compilations of one forward method, one for each size of its blocks; torch's default is 8."""

SOURCES_OF_NOISE = ("torch.utils.cpp_extension", "torch._higher_order_ops.wrap")
"""Loggers whose warnings a user can't act on: that a machine has no GPU, that a layer is computed again."""


def check(options: Options, device: torch.device) -> None:
    """Raises MusterError where there is no compiler for C (for GPUs) or C++ (for CPUs), or no headers of Python."""
    if options.compile == "off":
        return
    variable, names = COMPILERS[device.type]
    chosen = os.environ.get(variable)
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [] if header.is_file() else [f"no {header}"]
    if not any(shutil.which(name) for name in ([chosen] if chosen else names)):
        missing.append(f"{variable}={chosen}" if chosen else f"no {', '.join(names)} on PATH")
    if missing:
        raise MusterError(
            "to compile, torch needs a C or C++ compiler and the headers of Python",
            seen=f"--compile={options.compile}, {', '.join(missing)}",
            fix="apt-get install g++ python3-dev, or 'module load gcc'; or leave out --compile",
        )


def compile_model(model: nn.Module, options: Options) -> None:
    """Makes `model` (without the strategy's wrapper) compile itself at its first step."""
    if options.compile == "off":
        return
    torch._dynamo.config.recompile_limit = max(NUM_SHAPES, torch._dynamo.config.recompile_limit)
    for name in SOURCES_OF_NOISE if not os.environ.get("MUSTER_DEBUG") else ():
        logging.getLogger(name).setLevel(logging.ERROR)
    is_sharded = any(isinstance(part, FSDPModule) for part in model.modules())
    for part in blocks_of(model) if is_sharded or isinstance(model, GPT) else [model]:
        part.forward = compiled(part.forward, options)  # not part.compile(), which would compile the hooks too
    if isinstance(model, GPT) and model.embed is not None:
        model.embed.register_forward_hook(complete_embedding)


def complete_embedding(module: nn.Module, inputs: Any, outputs: torch.Tensor) -> torch.Tensor | None:
    """Forward hook of the embedding that completes the tensor which tp sends between ranks, where it is still pending.

    torch 2.15 compiles a pending tensor (AsyncCollectiveTensor) as a type of its own, but its gradient as another type.
    """
    return outputs.clone() if isinstance(outputs, AsyncCollectiveTensor) else None


def compile_loss(gradients: Gradients, options: Options) -> None:
    """Compiles the loss of a transformer: over many tokens it takes a good part of a step."""
    if options.compile != "off" and options.predicts_tokens:
        gradients.criterion = compiled(gradients.criterion, options)


def compiled(function: Any, options: Options) -> Any:
    """Compiles `function` as `--compile` says.

    CUDA graphs, a part of max-autotune, keep gradients in memory that the next micro-batch would overwrite.
    """
    # No dynamic shapes: training has one shape, but torch would use them for blocks that differ in size alone.
    mode = None if options.compile == "default" else "max-autotune"
    if mode is not None and options.accumulate > 1:
        mode += "-no-cudagraphs"
    return torch.compile(function, mode=mode, dynamic=False)


def uncompiled(options: Options) -> AbstractContextManager[Any]:
    """A context in which all code runs uncompiled: validation would cost a compilation for each odd batch size."""
    return nullcontext() if options.compile == "off" else torch.compiler.set_stance("force_eager")
