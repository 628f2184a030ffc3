"""Joules of a rank's GPU, by the counter that NVML keeps of each card since the driver was loaded."""

from typing import Any

import torch


class Energy:
    """What this rank's GPU takes while it is counted; nothing where nobody knows.

    The counter is the whole card's. Where a card is divided (MIG), or has none, nothing is told.
    """

    def __init__(self, device: torch.device) -> None:
        self.joules: float | None = 0.0
        self.before: float | None = None
        self.nvml: Any = None
        self.handle: Any = None
        if device.type != "cuda":
            self.joules = None
            return
        try:
            import pynvml  # only where there is a GPU: it takes time to load

            pynvml.nvmlInit()
            self.nvml = pynvml
            # By its name in the driver: numbers are those of CUDA_VISIBLE_DEVICES here, and all cards' there.
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        except Exception:  # no driver library, no such card, an old binding: all mean that nobody knows
            self.joules = None
        self.read()

    def read(self) -> float | None:
        """Joules that the card has taken until now."""
        if self.joules is None:
            return None
        try:
            return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000
        except Exception:  # not supported by this card
            self.joules = None
            return None

    def count(self, counts: bool) -> None:
        """Begins to count, or ends it."""
        now = self.read()
        if counts:
            self.before = now
        elif now is not None and self.before is not None and self.joules is not None:
            self.joules, self.before = self.joules + now - self.before, None
