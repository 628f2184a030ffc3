"""One rank of `muster doctor` or `muster bench`: `python -m muster.check doctor OPTIONS`, or bench."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from muster import interruption

if __name__ == "__main__":
    interruption.start_rank(f"muster {sys.argv[1]}")

from muster.arguments import from_argv
from muster.check.options import BenchOptions, DoctorOptions
from muster.errors import MusterError, notify_if_slow

OPTIONS = {"doctor": DoctorOptions, "bench": BenchOptions}


def main() -> None:
    name, *argv = sys.argv[1:]
    if not os.environ.get("MUSTER_DEBUG"):
        # A user can't act on the warnings of torch's C++ code.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with interruption.command(f"muster {name}"):
        options = parse(name, argv)
    # Not imported above, so that a misspelt option is reported before torch is loaded.
    with notify_if_slow("loading PyTorch", is_shown=not interruption.current.is_silent):
        program = import_module(f"muster.check.{name}.run")

    with interruption.clearing_up():
        program.run(options)


def parse(name: str, argv: Sequence[str]) -> DoctorOptions | BenchOptions:
    """The options of `muster NAME`, parsed from `argv`.

    Raises:
        MusterError: an option or a value is not valid. The launcher, which parses the same arguments, names it.
    """
    if (options := from_argv(argv, OPTIONS[name])) is None:
        fix = f"muster {name} --help lists what there is"
        raise MusterError("an option is unknown, or does not take this value", seen=" ".join([name, *argv]), fix=fix)
    return options[0]


if __name__ == "__main__":
    main()
