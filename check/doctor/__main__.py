"""`python -m check.doctor OPTIONS`: one rank of a look at all nodes of a job."""

import sys

from check.options import DoctorOptions
from check.parsing import parse, silence_torch


def main() -> None:
    options = parse("muster doctor", DoctorOptions, sys.argv[1:])
    silence_torch()
    # Here and not above: a misspelt option must not wait for torch.
    from check.doctor.looking import run

    run(options)


if __name__ == "__main__":
    main()
