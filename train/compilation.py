"""Compiling the model: `--compile`.

Forward methods are compiled, and with them their backward passes, but no hooks (those of fsdp and tp). A transformer is
compiled layer by layer: its layers are alike, so one compilation serves all, and ddp gets the gradients of a layer as
soon as they are there. So are the blocks of any model that is sharded. Another model is compiled whole; within ddp
torch splits its graph where a bucket of gradients is full, so that these travel while the rest is computed.

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
"""By device: the variable that names the compiler which torch's own one needs, and what it tries without."""

NUM_SHAPES = 64
"""How many times one forward method may be compiled, for blocks of as many sizes; torch stops at 8."""

SOURCES_OF_NOISE = ("torch.utils.cpp_extension", "torch._higher_order_ops.wrap")
"""Loggers that say what no user can change: there is no GPU on a machine without, a layer is computed again."""


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
            "torch compiles with a compiler of the system and the headers of Python",
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
        part.forward = compiled(part.forward, options)  # and not part.compile(): that would take in the hooks
    if isinstance(model, GPT) and model.embed is not None:
        model.embed.register_forward_hook(arrived)


def arrived(module: nn.Module, inputs: Any, outputs: torch.Tensor) -> torch.Tensor | None:
    """What tp sends between ranks, when it is there.

    Compiled, torch 2.15 takes a tensor that is on its way for one of its own kind, and gives gradients of another.
    """
    return outputs.clone() if isinstance(outputs, AsyncCollectiveTensor) else None


def compile_loss(gradients: Gradients, options: Options) -> None:
    """Compiles what comes after the model: of a transformer, its loss over many tokens is a good part of a step."""
    if options.compile != "off" and options.predicts_tokens:
        gradients.criterion = compiled(gradients.criterion, options)


def compiled(function: Any, options: Options) -> Any:
    """`function`, compiled as `--compile` says.

    CUDA graphs, which max-autotune takes, keep gradients where the next micro-batch would overwrite them.
    """
    # Without dynamic shapes: training has one, but blocks of a model that are alike but for their sizes have theirs.
    mode = None if options.compile == "default" else "max-autotune"
    if mode is not None and options.accumulate > 1:
        mode += "-no-cudagraphs"
    return torch.compile(function, mode=mode, dynamic=False)


def uncompiled(options: Options) -> AbstractContextManager[Any]:
    """A context in which all is computed as it is written: the odd sizes of validation would each be compiled."""
    return nullcontext() if options.compile == "off" else torch.compiler.set_stance("force_eager")
