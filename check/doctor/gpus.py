"""What the NVIDIA driver tells of this node's GPUs, without using one of them.

Source: https://docs.nvidia.com/deploy/nvml-api/
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from check.doctor.facts import Gpu

SLOWED = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Reasons for which a clock is lowered, and that a healthy idle GPU does not have: not idleness, not a power limit."""

MOST_LINKS = 36
"""More than any GPU has NVLinks."""


def look(nvml: Any = None) -> tuple[list[Gpu] | None, str | None]:
    """The GPUs, None without a driver; and the driver's version.

    Args:
        nvml: in place of pynvml.
    """
    if nvml is None:
        nvml = import_module("pynvml")  # only here: it takes time to load
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None, None
    try:
        number = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
        handles = [(index, _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(number)]
        gpus = [_gpu(nvml, index, handle) for index, handle in handles if handle is not None]
        return gpus, _text(_ask(nvml, nvml.nvmlSystemGetDriverVersion))
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def _ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the driver answers; None for what this GPU does not have or this user may not know."""
    try:
        return function(*arguments)
    except (nvml.NVMLError, AttributeError, TypeError):
        return None


def _text(answer: Any) -> str | None:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *arguments: Any) -> Any:
        # An older driver, or an older pynvml, has not all of them.
        function = getattr(nvml, name, None)
        return None if function is None else _ask(nvml, function, handle, *arguments)

    # Of the second kind: the first counts what the driver keeps for itself as used.
    memory = ask("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None)) or ask("nvmlDeviceGetMemoryInfo")
    ecc, mig, rows = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetRemappedRows")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(MOST_LINKS)]
    persistence = ask("nvmlDeviceGetPersistenceMode")
    return Gpu(
        index=index,
        uuid=_text(ask("nvmlDeviceGetUUID")),
        name=_text(ask("nvmlDeviceGetName")),
        total=None if memory is None else memory.total,
        free=None if memory is None else memory.free,
        used=None if memory is None else memory.used,
        ecc=None if ecc is None else bool(ecc[0]),
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        remapping=None if rows is None else "failed" if rows[3] else "pending" if rows[2] else None,
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        slowed_by=tuple(word for bit, word in SLOWED.items() if reasons & bit),
        mig=None if mig is None else bool(mig[0]),
        links=None if all(link is None for link in links) else sum(link == 1 for link in links),
        persistence=None if persistence is None else bool(persistence),
    )
