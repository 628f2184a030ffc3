"""`python -m muster.check.doctor OPTIONS`: one rank of a check of all nodes of a job."""

import sys

from muster.check.options import DoctorOptions, parse


def main() -> None:
    options = parse("muster doctor", DoctorOptions, sys.argv[1:])
    # Here and not above: a misspelt option must not wait for torch.
    from muster.check.doctor.run import run

    run(options)


if __name__ == "__main__":
    main()
