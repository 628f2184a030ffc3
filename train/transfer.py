"""From the host's memory to the device, such that the host does not wait for what the device has still to do."""

from collections.abc import Sequence

import torch


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`values` as a tensor on `device`."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    # From pinned memory: a copy from any other waits for all that the device has to do.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
