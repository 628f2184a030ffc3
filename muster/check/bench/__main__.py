"""`python -m muster.check.bench OPTIONS`: one rank of a measurement of what the ranks send each other."""

import sys

from muster.check.options import BenchOptions, parse


def main() -> None:
    options = parse("muster bench", BenchOptions, sys.argv[1:])
    # Here and not above: a misspelt option must not wait for torch.
    from muster.check.bench.main import run

    run(options)


if __name__ == "__main__":
    main()
