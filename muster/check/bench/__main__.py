"""`python -m muster.check.bench OPTIONS`: one rank of a measurement of what the ranks send each other."""

import sys

from muster import interruption

if __name__ == "__main__":
    interruption.start_rank("muster bench")

from muster.check.options import BenchOptions, parse
from muster.notices import said_if_slow


def main() -> None:
    options = parse("muster bench", BenchOptions, sys.argv[1:])
    # Here and not above: a misspelt option must not wait for torch.
    with said_if_slow("loading PyTorch", is_said=not interruption.current.is_silent):
        from muster.check.bench.main import run

    with interruption.clearing_up():
        run(options)


if __name__ == "__main__":
    main()
