"""The most operations a second that cards are sold for, without sparsity: what a share of them (MFU) is a share of.

A card is known by its whole name, as torch tells it. A part of one (MIG), a variant of one site or a card of which no
published figure is at hand is unknown: no share is better than a wrong one.
"""

import re
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Operations of a card, in 10^12 a second, dense.

    Attributes:
        half: bf16 (before Ampere fp16) by tensor cores.
        tf32: fp32 by tensor cores; None where they can't.
        single: fp32 without them.
        source: the document that says so.
    """

    half: float
    tf32: float | None
    single: float
    source: str


# Datasheets of cards since Ampere give their figures with sparsity, or both: these are the halves without. Of A30,
# H100 NVL and H200 NVL only bf16 was looked up; TF32 is half of it, and fp32 is still to be held to the datasheet.
A100 = Peak(half=312, tf32=156, single=19.5, source="NVIDIA A100 datasheet, nvidia-1758950-r4")
A30 = Peak(half=165, tf32=82, single=10.3, source="NVIDIA A30 datasheet")
A40 = Peak(half=149.7, tf32=74.8, single=37.4, source="NVIDIA A40 datasheet")
A10 = Peak(half=125, tf32=62.5, single=31.2, source="NVIDIA A10 datasheet")
H100_SXM = Peak(half=989.4, tf32=494.7, single=66.9, source="NVIDIA H100 Tensor Core GPU architecture whitepaper")
H100_PCIE = Peak(half=756, tf32=378, single=51, source="NVIDIA H100 datasheet, PCIe")
H100_NVL = Peak(half=835, tf32=417.5, single=60, source="NVIDIA H100 datasheet, NVL")
H200_SXM = Peak(half=989, tf32=494, single=67, source="NVIDIA H200 datasheet, SXM")
H200_NVL = Peak(half=835.5, tf32=417.5, single=60, source="NVIDIA H200 datasheet, NVL")
# Its GPU has the 132 multiprocessors of that H100, and their clock.
GH200 = replace(H100_SXM, source=f"{H100_SXM.source}, as GH200's GPU is the H100 SXM's")
B200 = Peak(half=2250, tf32=1100, single=75, source="NVIDIA Blackwell datasheet, HGX B200")
GB200 = Peak(half=2500, tf32=1250, single=80, source="NVIDIA Blackwell datasheet, GB200 NVL72")
L40S = Peak(half=362.05, tf32=183, single=91.6, source="NVIDIA L40S datasheet")
L4 = Peak(half=121, tf32=60, single=30.3, source="NVIDIA L4 datasheet")
V100_SXM = Peak(half=125, tf32=None, single=15.7, source="NVIDIA V100 datasheet, us-1165301-r5, SXM2")
V100_PCIE = Peak(half=112, tf32=None, single=14, source="NVIDIA V100 datasheet, us-1165301-r5, PCIe")
V100S = Peak(half=130, tf32=None, single=16.4, source="NVIDIA V100 datasheet, us-1165301-r5, V100S")
T4 = Peak(half=65, tf32=None, single=8.1, source="NVIDIA T4 datasheet, 951643")

CARDS: dict[str, Peak] = {
    r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe": A100,
    r"NVIDIA A30": A30,
    r"NVIDIA A40": A40,
    r"NVIDIA A10": A10,
    r"NVIDIA H100 80GB HBM3": H100_SXM,
    r"NVIDIA H100 PCIe": H100_PCIE,
    r"NVIDIA H100 NVL": H100_NVL,
    r"NVIDIA H200": H200_SXM,
    r"NVIDIA H200 NVL": H200_NVL,
    r"NVIDIA GH200 (120GB|480GB|144G HBM3e)": GH200,
    r"NVIDIA B200": B200,
    r"NVIDIA GB200": GB200,
    r"NVIDIA L40S": L40S,
    r"NVIDIA L4": L4,
    r"(Tesla |NVIDIA )V100-(SXM2|SXM3)-(16|32)GB(-LS)?": V100_SXM,
    r"(Tesla |NVIDIA )V100-PCIE-(16|32)GB": V100_PCIE,
    r"(Tesla |NVIDIA )V100S-PCIE-32GB": V100S,
    r"(Tesla |NVIDIA )T4": T4,
}
"""Names of cards, as torch.cuda.get_device_name tells them, as patterns."""


def find(name: str) -> Peak | None:
    """The peak of the card called `name`; None for one that is not known."""
    return next((peak for pattern, peak in CARDS.items() if re.fullmatch(pattern, name)), None)


def flops(peak: Peak, *, bf16: bool, tf32: bool) -> float:
    """Operations a second of a card that computes so; fp32 where neither holds."""
    if bf16:
        return peak.half * 1e12
    return (peak.tf32 if tf32 and peak.tf32 is not None else peak.single) * 1e12


def of_device(device: torch.device, *, bf16: bool, convolves: bool) -> tuple[float, str] | None:
    """Operations a second of this device, and the document that says so; None where it is not known.

    Args:
        convolves: most of the model is convolutions, which torch allows tensor cores by default, and not products of
            matrices, which it does not.
    """
    peak = None if device.type != "cuda" else find(torch.cuda.get_device_name(device))
    if peak is None:
        return None
    tf32 = torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"
    return flops(peak, bf16=bf16, tf32=tf32), peak.source
