"""Who started this process. A launcher is one module with `detect(env) -> Task | None`.

`None` means "not mine"; present but broken raises. To add one: a module, its line below, a recording with its test.
"""

from collections.abc import Callable, Mapping

from entrypoint.allocation import Task
from entrypoint.launchers import srun

# The innermost launcher comes first: it is the one that knows this process.
DETECTORS: tuple[Callable[[Mapping[str, str]], Task | None], ...] = (srun.detect,)


def detect(env: Mapping[str, str]) -> Task | None:
    """Which task of which launcher this process is, or None where nothing started it as one of several.

    Raises:
        MusterError: a launcher's variables are there, but broken.
    """
    for detector in DETECTORS:
        found = detector(env)
        if found is not None:
            return found
    return None
