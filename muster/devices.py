"""The GPUs that CUDA shows a process."""

import re
from itertools import takewhile


def visible_gpus(text: str | None) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES=`text` names, by CUDA's own rule: up to the first entry that is no device."""
    # Empty and -1 hide all GPUs, as does HTCondor's 10000. Of MIG devices a process sees only the first.
    names = [name.strip() for name in (text or "").split(",")]
    if re.fullmatch("MIG-[0-9A-Za-z/-]+", names[0]):
        return names[:1]
    return list(takewhile(re.compile("[0-9]{1,4}|GPU-[0-9A-Za-z-]+").fullmatch, names))
