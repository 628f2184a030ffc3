"""The whole look, on one rank: facts, then the network, then a trial; rank 0 judges and prints."""

import os
import sys
import time

import torch.distributed as dist

from check.doctor import clock, gather, meeting, names, reach, show, trial
from check.doctor.facts import Facts
from check.doctor.findings import FAULTY, Finding, Part
from check.doctor.judge import judge
from check.doctor.looked import Looked
from check.leaving import leave
from check.options import DoctorOptions
from train.errors import MusterError
from train.world import World

HARMLESS = {"shm", "checkpoints", "open files", "memlock", "clock"}
"""What may be wrong while ranks can still speak to each other: a trial need not wait for it to be mended."""


def run(options: DoctorOptions) -> None:
    """Looks, prints, and ends this process: all ranks with the same code."""
    looked, world, is_cut_off = Looked(), None, False
    try:
        world = meeting.join(options.timeout_s)
        started = time.monotonic()
        look(world, options, looked)
        code = meeting.gather(world, looked.code)[0]
        looked.seconds = time.monotonic() - started
    except meeting.Absent as absent:
        world, code = absent.world, FAULTY
        looked.why += meeting.missing(absent.world, absent.ranks)
    except MusterError as error:
        code, is_cut_off = FAULTY, world is None
        looked.why.append(Finding("fault", "launch", "", error.wrong, error.seen, error.fix))
    except dist.DistError as error:
        code, is_cut_off = FAULTY, True
        looked.why.append(meeting.lost(world, error))
    if os.environ.get("RANK", "0") == "0":
        show.show(looked, world, options)
    elif is_cut_off:
        # Nobody else knows of it.
        print(*map(show.plain, looked.why), sep="\n", file=sys.stderr, flush=True)
    leave(world, code, failed=code == FAULTY)


def look(world: World, options: DoctorOptions, looked: Looked) -> None:
    """Adds to `looked` all that is seen; to be called on all ranks."""
    told = meeting.gather(world, gather.as_json(gather.rank(world, options)), to_all=False)
    if world.main:
        looked.facts = Facts([gather.from_json(rank) for rank in told], options.device)
        looked.parts += judge(looked.facts)
    looked.parts += [part.look(world, options) for part in (names, reach, clock)]
    if options.quick:
        return
    in_its_way = [finding for finding in looked.findings if finding.level == "fault" and finding.about not in HARMLESS]
    if meeting.gather(world, bool(in_its_way))[0]:
        looked.parts.append(Part("collectives", "not tried: mend the faults first", is_seen=False))
    else:
        looked.parts.append(trial.look(world, options))
