"""Who owns the nodes. A scheduler is one module with `detect(env) -> Hosts | None`.

`None` means "not mine"; present but broken raises. To add one: a module, its line below, a recording with its test.
"""

from collections.abc import Callable, Mapping

from entrypoint.allocation import Hosts
from entrypoint.schedulers import slurm

DETECTORS: tuple[Callable[[Mapping[str, str]], Hosts | None], ...] = (slurm.detect,)


def detect(env: Mapping[str, str]) -> Hosts | None:
    """The job that this process belongs to, or None without a scheduler.

    Raises:
        MusterError: a scheduler's variables are there, but broken.
    """
    for detector in DETECTORS:
        found = detector(env)
        if found is not None:
            return found
    return None
