"""`python -m muster.check doctor OPTIONS`, or bench: one rank of a check of all nodes, or of a measurement."""

import sys
from importlib import import_module

from muster import interruption

if __name__ == "__main__":
    interruption.start_rank(f"muster {sys.argv[1]}")

from muster.check.options import BenchOptions, DoctorOptions, parse
from muster.notices import said_if_slow


def main() -> None:
    name, *argv = sys.argv[1:]
    options = parse(f"muster {name}", {"doctor": DoctorOptions, "bench": BenchOptions}[name], argv)
    # Here and not above: a misspelt option must not wait for torch.
    with said_if_slow("loading PyTorch", is_said=not interruption.current.is_silent):
        program = import_module(f"muster.check.{name}.run")

    with interruption.clearing_up():
        program.run(options)


if __name__ == "__main__":
    main()
