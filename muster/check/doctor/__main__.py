"""`python -m muster.check.doctor OPTIONS`: one rank of a check of all nodes of a job."""

import sys

from muster import interruption

if __name__ == "__main__":
    interruption.start_rank("muster doctor")

from muster.check.options import DoctorOptions, parse
from muster.notices import said_if_slow


def main() -> None:
    options = parse("muster doctor", DoctorOptions, sys.argv[1:])
    # Here and not above: a misspelt option must not wait for torch.
    with said_if_slow("loading PyTorch", is_said=not interruption.current.is_silent):
        from muster.check.doctor.run import run

    with interruption.clearing_up():
        run(options)


if __name__ == "__main__":
    main()
