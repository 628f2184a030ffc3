"""`muster doctor` and `muster bench`: programs of check/, started as a training would be."""

import sys
from collections.abc import Callable
from dataclasses import replace

import typer

from check.options import BenchOptions, DoctorOptions
from entrypoint import starting
from entrypoint.options import LaunchOptions
from entrypoint.program import Program
from train.arguments import command, to_argv

RDZV_TIMEOUT_S = 120
"""A look at the nodes must not wait for one of them as long as a training does."""


def add_to(app: typer.Typer) -> None:
    """Adds the commands to `muster`."""
    doctor = "Look at all nodes of this job: what is wrong, and where."
    app.command("doctor", help=doctor)(command(_starter("doctor"), LaunchOptions, DoctorOptions))
    bench = "Measure how fast ranks reach each other, and by which network."
    app.command("bench", help=bench)(command(_starter("bench"), LaunchOptions, BenchOptions))


def _starter(name: str) -> Callable[..., None]:
    def start(options: LaunchOptions, checks: DoctorOptions | BenchOptions) -> None:
        if options.rdzv_timeout == LaunchOptions.rdzv_timeout:
            options = replace(options, rdzv_timeout=RDZV_TIMEOUT_S)
        # Of the doctor 1 says that there are warnings.
        failure = 2 if name == "doctor" else 1
        program = Program("module", (f"check.{name}", *to_argv(checks)), is_ours=True, failure=failure)
        starting.start(options, program, ["muster", *sys.argv[1:]])

    return start
