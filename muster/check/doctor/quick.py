"""What `train --preflight` checks: the quick part of `muster doctor`, before the ranks open their process group."""

from typing import Any, Literal

from muster.check import ranks
from muster.check.doctor import report
from muster.check.doctor.findings import FAULTY
from muster.check.doctor.report import Report
from muster.check.doctor.run import absent_ranks, check
from muster.check.options import DoctorOptions
from muster.errors import ExitCode
from muster.train import console
from muster.train.faults import SharedFault
from muster.train.world import World

GO_ON = "without --preflight the training starts nonetheless"


def preflight(world: World, device: Literal["auto", "cuda", "cpu"], checkpoint_dir: str) -> None:
    """Returns where a training may start; rank 0 says what it found.

    Args:
        world: with its hosts.

    Raises:
        SharedFault: on all ranks, where it would fail or be wrong, or where some ranks did not come.
    """
    options = DoctorOptions(quick=True, device=device, checkpoint_dir=checkpoint_dir, timeout_s=world.timeout_s)
    found = Report()
    try:
        check(world, options, found)
        answer: dict[str, Any] = {"code": found.code, "verdict": report.verdict(found.findings)}
        answer = ranks.gather(world, answer)[0]
    except ranks.Absent as absent:
        first = absent_ranks(absent)[0]
        where = f" ({first.host})" if first.host else ""
        raise SharedFault(first.wrong + where, seen=first.seen, fix=first.fix, code=ExitCode.FAILED) from None
    if world.main:
        for finding in found.findings:
            console.tell(report.plain(finding))
    if answer["code"] == FAULTY:
        fix = f"mend what is named above; `muster doctor` in place of `train` checks more; {GO_ON}"
        raise SharedFault(
            "the nodes are not fit to train on", seen=answer["verdict"], fix=fix, code=ExitCode.USER_MUST_CHANGE
        )
