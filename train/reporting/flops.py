"""Operations: those of a model, counted, and those that a card can do, by its datasheet."""

import re
from typing import NamedTuple

import torch

from muster.config import Options
from muster.train.models import gpt
from muster.train.parallel.strategy import loss_of

BATCH = 2
"""Samples that are counted: one alone can't be normalised where its features are one number."""


def count_flops(options: Options, num_classes: int, size: int) -> float:
    """Operations of one sample (an image of `size` pixels a side, a sequence of `size` tokens), forth and back.

    They are those of the model: a multiplication and an addition are two, attention counts as if it were not causal,
    and what activation checkpointing computes again counts once (the model FLOPs of arXiv 2204.02311, appendix B).
    """
    # Here and not above: it loads triton, and only rank 0 counts.
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        if options.predicts_tokens:
            model = gpt.GPT(gpt.shape_of(options.model), num_classes)
            inputs = targets = torch.zeros(BATCH, size, dtype=torch.int64)
        else:
            from muster.train.models import images  # here and not above: see train/models

            model = images.construct(options.model, num_classes, size)
            inputs, targets = torch.empty(BATCH, 3, size, size), torch.zeros(BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss_of(model(inputs), targets).backward()
    return counter.get_total_flops() / BATCH


class Peak(NamedTuple):
    """Operations of a card, in 10^12 a second, dense.

    Attributes:
        half: bf16 (before Ampere fp16) by tensor cores.
        tf32: fp32 by tensor cores; None where they can't.
        single: fp32 without them.
    """

    half: float
    tf32: float | None
    single: float


# From NVIDIA's datasheets, and the H100's architecture whitepaper. Those of cards since Ampere give their figures with
# sparsity, or both: these are the halves without. Of A30, H100 NVL and H200 NVL only bf16 was looked up; TF32 is half
# of it, and fp32 is still to be held to the datasheet.
CARDS: dict[str, Peak] = {
    r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe": Peak(312, 156, 19.5),  # nvidia-1758950-r4
    r"NVIDIA A30": Peak(165, 82, 10.3),
    r"NVIDIA A40": Peak(149.7, 74.8, 37.4),
    r"NVIDIA A10": Peak(125, 62.5, 31.2),
    # The GPU of GH200 has the 132 multiprocessors of the H100 SXM, and their clock.
    r"NVIDIA H100 80GB HBM3|NVIDIA GH200 (120GB|480GB|144G HBM3e)": Peak(989.4, 494.7, 66.9),
    r"NVIDIA H100 PCIe": Peak(756, 378, 51),
    r"NVIDIA H100 NVL": Peak(835, 417.5, 60),
    r"NVIDIA H200": Peak(989, 494, 67),
    r"NVIDIA H200 NVL": Peak(835.5, 417.5, 60),
    r"NVIDIA B200": Peak(2250, 1100, 75),  # HGX B200
    r"NVIDIA GB200": Peak(2500, 1250, 80),  # GB200 NVL72
    r"NVIDIA L40S": Peak(362.05, 183, 91.6),
    r"NVIDIA L4": Peak(121, 60, 30.3),
    r"(Tesla |NVIDIA )V100-(SXM2|SXM3)-(16|32)GB(-LS)?": Peak(125, None, 15.7),  # us-1165301-r5
    r"(Tesla |NVIDIA )V100-PCIE-(16|32)GB": Peak(112, None, 14),
    r"(Tesla |NVIDIA )V100S-PCIE-32GB": Peak(130, None, 16.4),
    r"(Tesla |NVIDIA )T4": Peak(65, None, 8.1),  # 951643
}
"""Names of cards, as torch.cuda.get_device_name tells them, as patterns."""


def peak_flops(device: torch.device, *, bf16: bool, convolves: bool) -> float | None:
    """Operations a second of this device; None where they are not known.

    Args:
        convolves: most of the model is convolutions, which torch allows tensor cores by default, and not products of
            matrices, which it does not.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = next((peak for pattern, peak in CARDS.items() if re.fullmatch(pattern, name)), None)
    if peak is None:
        return None
    tf32 = torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"
    if bf16:
        return peak.half * 1e12
    return (peak.tf32 if tf32 and peak.tf32 is not None else peak.single) * 1e12
