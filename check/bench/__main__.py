"""`python -m check.bench OPTIONS`: one rank of a measurement of what the ranks say to each other."""

import sys

from check.options import BenchOptions
from check.parsing import parse, silence_torch


def main() -> None:
    options = parse("muster bench", BenchOptions, sys.argv[1:])
    silence_torch()
    # Here and not above: a misspelt option must not wait for torch.
    from check.bench.running import run

    run(options)


if __name__ == "__main__":
    main()
