"""Which of the faster ways of computing this device has."""

from dataclasses import dataclass
from pathlib import Path

import torch

from muster.config import Options


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The ways of computing that are in effect."""

    bf16: bool
    channels_last: bool
    fused: bool

    @property
    def layout(self) -> torch.memory_format:
        """How images, and the weights that are laid over them, lie in memory."""
        return torch.channels_last if self.channels_last else torch.preserve_format

    def autocast(self, device: torch.device) -> torch.autocast:
        """A context in which the model computes in bfloat16 where that is safe, if it is on."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def __str__(self) -> str:
        words = ["bf16 autocast" if self.bf16 else "fp32"]
        words += ["channels_last"] if self.channels_last else []
        words += ["fused optimizer"] if self.fused else []
        return ", ".join(words)


def choose_precision(options: Options, device: torch.device) -> Precision:
    """What the options ask for; where they leave it open, what the device does in hardware."""
    bf16 = has_bf16(device) if options.bf16 is None else options.bf16
    # On CPUs torch's fused SGD is no faster than the plain one, and wrong where a gradient is not laid out in memory as
    # its weight is.
    fused = options.fused and (options.optimizer != "sgd" or device.type == "cuda")
    return Precision(bf16=bf16, channels_last=options.channels_last, fused=fused)


def has_bf16(device: torch.device) -> bool:
    """True where bfloat16 is computed by hardware: emulated, it is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16"})
