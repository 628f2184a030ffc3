"""`python -m muster.train STRATEGY OPTIONS`: one rank of a training run."""

import os
import sys

from muster import interruption

if __name__ == "__main__":
    interruption.start_rank(" ".join(["train", *sys.argv[1:2]]))

import gc
from collections.abc import Sequence

import typer

from muster.config import Options, parse
from muster.errors import ExitCode, MusterError
from muster.notices import said_if_slow
from muster.train.health.parent import Guard


def read(argv: Sequence[str]) -> tuple[str, Options]:
    """The strategy and the options of `argv`; a usage error in three lines ends the process with code 2."""
    try:
        return parse(argv)
    except MusterError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.code) from None
    except typer.TyperException as error:
        fix = "python -m muster.train STRATEGY --help lists what there is"
        words = " ".join(argv) or "no arguments"
        print(MusterError(error.format_message(), seen=f"train {words}", fix=fix), file=sys.stderr)
        raise SystemExit(ExitCode.USER_MUST_CHANGE) from None


def main() -> None:
    interruption.start_rank(" ".join(["train", *sys.argv[1:2]]))  # also where another program calls this
    guard = Guard()
    gc.disable()  # until the training begins (train/health/memory.py)
    strategy, options = read(sys.argv[1:])
    if not os.environ.get("MUSTER_DEBUG"):
        # Notes of torch's C++ side (reverse look-ups of addresses, retries) that a user can't act on.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Here and not above: a misspelt option must not wait for torch.
    with said_if_slow("loading PyTorch", is_said=not interruption.current.is_silent):
        from muster.train.process import run_process

    run_process(strategy, options, guard)


if __name__ == "__main__":
    main()
