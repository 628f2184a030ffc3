"""What `train --preflight` looks at: the quick part of `muster doctor`, before the ranks open their process group."""

from typing import Any, Literal

from check.doctor import looking, meeting, show
from check.doctor.findings import FAULTY
from check.doctor.looked import Looked
from check.options import DoctorOptions
from train import console
from train.errors import FAILED, USER_MUST_CHANGE
from train.faults import SharedFault
from train.world import World

GO_ON = "without --preflight the training starts nonetheless"


def preflight(world: World, device: Literal["auto", "cuda", "cpu"], checkpoint_dir: str) -> None:
    """Returns where a training may start; rank 0 says what it found.

    Args:
        world: with its hosts.

    Raises:
        SharedFault: on all ranks, where it would fail or be wrong, or where some ranks did not come.
    """
    options = DoctorOptions(quick=True, device=device, checkpoint_dir=checkpoint_dir, timeout_s=world.timeout_s)
    looked = Looked()
    try:
        looking.look(world, options, looked)
        told: dict[str, Any] = meeting.gather(world, {"code": looked.code, "verdict": show.verdict(looked.findings)})[0]
    except meeting.Absent as absent:
        first = meeting.missing(world, absent.ranks)[0]
        where = f" ({first.host})" if first.host else ""
        raise SharedFault(first.wrong + where, seen=first.seen, fix=first.fix, code=FAILED) from None
    if world.main:
        for finding in looked.findings:
            console.tell(show.plain(finding))
    if told["code"] == FAULTY:
        fix = f"mend what is named above; `muster doctor` in place of `train` looks at more; {GO_ON}"
        raise SharedFault("the nodes are not fit to train on", seen=told["verdict"], fix=fix, code=USER_MUST_CHANGE)
