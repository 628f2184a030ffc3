"""One rank of the whole check: facts of the nodes, then what ranks check together; rank 0 prints what was found.

`train --preflight` takes the quick part of it, before the ranks of a training open their process group.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from muster.check import ranks
from muster.check.doctor import clock, collectives, gpus, names, network, ports, report, resources, software
from muster.check.doctor.facts import DIED, Facts, Finding, Node, Part, Rank, attempt
from muster.check.doctor.report import Report
from muster.check.options import DoctorOptions
from muster.errors import ExitCode, MusterError
from muster.train import console
from muster.train.faults import SharedFault
from muster.train.world import World

HARMLESS = {"shm", "checkpoints", "open files", "memlock", "clock"}
"""What may be wrong while ranks can still speak to each other: the collectives need not wait for it to be mended."""


def run(options: DoctorOptions) -> None:
    """Checks, prints, and ends this process: all ranks with the same code."""
    found, world, is_cut_off = Report(), None, False
    try:
        tell("waiting for all ranks")
        world = ranks.join(options.timeout_s)
        started = time.monotonic()
        check(world, options, found, tell)
        code = ranks.gather(world, found.code)[0]
        found.seconds = time.monotonic() - started
    except ranks.Absent as absent:
        world = absent.world
        found.why += absent_ranks(absent)
        code = found.code
    except MusterError as error:
        code, is_cut_off = ExitCode.USER_MUST_CHANGE, world is None
        found.why.append(Finding("fault", "launch", "", error.wrong, error.seen, error.fix))
    except dist.DistError as error:
        code, is_cut_off = ExitCode.USER_MUST_CHANGE, True
        found.why.append(_lost(world, error))
    if os.environ.get("RANK", "0") == "0":
        report.show(found, world, options)
    elif is_cut_off:
        # Nobody else knows of it.
        print(*map(report.plain, found.why), sep="\n", file=sys.stderr, flush=True)
    ranks.leave(world, code, failed=code != ExitCode.DONE)


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
        code, verdict = ranks.gather(world, [found.code, report.verdict(found.findings)])[0]
    except ranks.Absent as absent:
        first = absent_ranks(absent)[0]
        where = f" ({first.host})" if first.host else ""
        raise SharedFault(first.wrong + where, seen=first.seen, fix=first.fix, code=ExitCode.FAILED) from None
    if world.main:
        for finding in found.findings:
            console.tell(report.plain(finding))
    if code != ExitCode.DONE:
        fix = (
            "mend what is named above; `muster doctor` in place of `train` checks more; without --preflight the "
            "training starts nonetheless"
        )
        raise SharedFault("the nodes are not fit to train on", seen=verdict, fix=fix, code=ExitCode.USER_MUST_CHANGE)


def tell(step: str) -> None:
    """Says on stderr what is done next, once for all ranks: a check of many nodes takes minutes."""
    if os.environ.get("RANK", "0") == "0":
        print(f"muster doctor: {step} ...", file=sys.stderr, flush=True)


def check(
    world: World, options: DoctorOptions, found: Report, begins: Callable[[str], None] = lambda step: None
) -> None:
    """Adds to `found` all that is found; to be called on all ranks, and calls `begins` before each step of it."""
    begins("asking each node for its software, devices and limits")
    of_ranks = ranks.gather(world, msgspec.to_builtins(gather(world, options)), to_all=False)
    if world.main:
        found.facts = facts = Facts(msgspec.convert(of_ranks, list[Rank]), options.device)
        found.parts += findings(facts)
    begins("trying names, ports and clocks between the nodes")
    places = network.gather_places(world)
    found.parts += [names.check(world, places, options), ports.check(world, places, options), clock.check(world)]
    if options.quick:
        return
    in_the_way = [finding for finding in found.findings if finding.level == "fault" and finding.about not in HARMLESS]
    if ranks.gather(world, bool(in_the_way))[0]:
        found.parts.append(Part("collectives", "not tried: mend the faults first", is_seen=False))
    else:
        begins("trying collectives between the ranks")
        found.parts.append(collectives.check(world, options))


def gather(world: World, options: DoctorOptions) -> Rank:
    """The facts of this rank; of its node too, where it is the first of its host."""
    address = attempt(lambda: network.towards(os.environ.get("MASTER_ADDR", ""))) or ""
    return Rank(
        rank=world.rank,
        host=world.host,
        local_rank=world.local_rank,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        num_gpus=0 if options.device == "cpu" else attempt(torch.cuda.device_count) or 0,
        cores=tuple(sorted(attempt(lambda: os.sched_getaffinity(0)) or ())),
        address=address or None,
        interface=attempt(lambda: network.interface_of(address, network.own_addresses())),
        node=_node(world.host, options) if world.hosts.index(world.host) == world.rank else None,
    )


def _node(host: str, options: DoctorOptions) -> Node:
    cards, driver = attempt(gpus.gather) or (None, None)
    fields: dict[str, Any] = {**resources.gather(), **network.gather()}
    return Node(
        host=host,
        software=software.gather(driver),
        gpus=None if cards is None else tuple(cards),
        shm=resources.gather_space("/dev/shm"),
        checkpoints=resources.gather_space(options.checkpoint_dir),
        variables=software.variables(),
        **fields,
    )


def findings(facts: Facts) -> list[Part]:
    """What the facts of all ranks tell, by subject."""
    return [
        software.findings(facts),
        gpus.findings(facts),
        resources.cores(facts),
        resources.shared_memory(facts),
        resources.checkpoints(facts),
        resources.limits(facts),
        software.settings(facts),
        network.findings(facts),
        network.link_findings(facts),
    ]


def absent_ranks(absent: ranks.Absent) -> list[Finding]:
    """What is said of ranks without an answer, by the host that each should be on, where that is known."""
    if absent.fault is not None:
        return [Finding("fault", DIED, absent.fault.host, absent.wrong, absent.seen, absent.fix)]
    by_host: dict[str, list[int]] = {}
    for rank in absent.ranks:
        hosts = absent.world.hosts
        by_host.setdefault(hosts[rank] if hosts else ranks.host_of(rank, absent.world), []).append(rank)
    each = {host: ranks.Absent(absent.world, own, had_come=absent.had_come) for host, own in by_host.items()}
    about = DIED if absent.had_come else "absent"
    return [Finding("fault", about, host, error.wrong, error.seen, error.fix) for host, error in each.items()]


def _lost(world: World | None, error: Exception) -> Finding:
    """Of a rank whose connection to the others broke."""
    wrong = f"rank {os.environ.get('RANK', '0')} lost the others: rank 0 or its agent is gone, or the network between"
    seen, fix = str(error).strip().partition("\n")[0], "look what the other nodes said, then try again"
    return Finding("fault", "absent", "" if world is None else world.host, wrong, seen, fix)
