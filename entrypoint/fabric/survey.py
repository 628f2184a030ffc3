"""What a root has of a fabric, and what is taken of it, with this image's profiles and libraries."""

import platform
from dataclasses import replace
from pathlib import Path

from entrypoint.fabric import find, inventory, planning
from entrypoint.fabric.inventory import Inventory
from entrypoint.fabric.loader import MACHINES
from entrypoint.fabric.model import FabricPlan, Finding
from entrypoint.sites import conditions, profiles
from entrypoint.sites.schema import Fabric, Site


def look(root: Path, wanted: str, site: Site | None = None) -> Finding:
    """What the host whose root is mounted at `root` has.

    Raises:
        MusterError: there is no fabric called `wanted`.
    """
    return find.find(root, profiles.fabrics(), wanted, site.libraries if site else None)


def plan(finding: Finding, num_nodes: int, site: Site | None = None, *, is_named: bool = True) -> FabricPlan:
    """What a job on `num_nodes` takes of it; the site's variables come before the fabric's.

    Args:
        is_named: whether the user named the fabric. Where no device told one, NCCL is not held to TCP: it may know
            another network.
    """
    profile = profile_of(finding)
    context = conditions.here(num_nodes)
    # To find out what an image without a list of its libraries has takes seconds.
    is_needed = finding.fabric != find.NO_FABRIC
    image = inventory.load() if is_needed else Inventory(MACHINES.get(platform.machine(), ""), {}, {})
    planned = planning.plan(finding, profile, image, context, site.libraries if site else None)
    if planned.refusals:
        return planned
    net = planned.net if is_needed or is_named else None
    return replace(planned, net=net, variables=profiles.variables(site, profile, context))


def without_host(finding: Finding, num_nodes: int, site: Site | None = None) -> FabricPlan:
    """What such a job needs where the container's own libraries are all that there is."""
    profile = profile_of(finding)
    context = conditions.here(num_nodes)
    net = profile.net.value if profile.net and conditions.holds(profile.net.when, context) else None
    return FabricPlan(finding, net=net, variables=profiles.variables(site, profile, context))


def profile_of(finding: Finding) -> Fabric:
    """The profile that the finding names."""
    return profiles.load_fabric(finding.fabric)
