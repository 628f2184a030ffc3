"""What keeps several nodes from using their fabric, as errors: NCCL itself would silently use TCP."""

import os
import shlex
from collections.abc import Mapping

from entrypoint.fabric.model import Device, FabricPlan, Finding, Refusal
from entrypoint.fabric.need import Need, Places
from train.errors import MusterError

MOUNT = "apptainer exec --bind /:/host:ro, docker run -v /:/host:ro"
ANYWAY = "over TCP, at a fraction of the speed: --fabric tcp"

# Kinds of devices that NCCL sends by.
_KINDS = ("infiniband", "roce", "efa", "slingshot")


def devices(finding: Finding) -> list[Device]:
    """Those that NCCL sends by."""
    return [device for device in finding.devices if device.kind in _KINDS]


def refused(refusals: tuple[Refusal, ...]) -> MusterError:
    """One error for all that does not fit into this image."""
    first, others = refusals[0], refusals[1:]
    seen = [f"{each.library}: {each.needs}, needed by {each.needed_by}" for each in refusals[:4]]
    more = f" (and {len(others)} more: muster fabric plan)" if others else ""
    return MusterError(first.wrong + more, seen="; ".join(seen), fix=f"{first.fix}; or {ANYWAY}")


def check_devices(need: Need, plan: FabricPlan, places: Places) -> None:
    """Returns if one of the fabric's device files is in this container, or the fabric has none."""
    paths = [each.path for each in devices(plan.finding) if each.path.startswith("/dev/")]
    if (
        need.is_several
        and need.is_proved
        and paths
        and not any(os.path.exists(places.own / path[1:]) for path in paths)
    ):
        raise MusterError(
            "the fabric's device files are not in this container",
            seen=f"{', '.join(paths)} on the host",
            fix=f"docker run {' '.join(f'--device {shlex.quote(path)}' for path in paths)}; or {ANYWAY}",
        )


def check_verbs(need: Need, plan: FabricPlan, env: Mapping[str, str], places: Places) -> None:
    """Returns if the image's own verbs can reach the devices."""
    if not (need.is_several and need.is_proved) or env.get("NCCL_NET", plan.net) != plan.net:
        return
    if not list((places.own / "dev/infiniband").glob("uverbs*")):
        raise MusterError(
            "there is InfiniBand or RoCE, but its device files are not in this container",
            seen=f"{plan.finding.why}; no {places.own / 'dev/infiniband'}/uverbs*",
            fix=f"docker run --device /dev/infiniband --ulimit memlock=-1 --cap-add IPC_LOCK; or {ANYWAY}",
        )
    from entrypoint.fabric import proof

    problem = proof.problem(["libibverbs.so.1"], env)
    if problem:
        raise MusterError(
            "there is InfiniBand or RoCE, but no library for it in this image",
            seen=problem,
            fix=f"{MOUNT}; or install libibverbs1 and ibverbs-providers; or {ANYWAY}",
        )
