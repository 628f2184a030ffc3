"""The plan of a container into which `muster fabric binds` put the host's libraries."""

from dataclasses import replace
from typing import TYPE_CHECKING

from entrypoint.fabric import elf, survey
from entrypoint.fabric.find import value
from entrypoint.fabric.model import FabricPlan, Injected

if TYPE_CHECKING:
    from entrypoint.fabric.need import Need, Places
    from entrypoint.sites.schema import Site


def plan(places: "Places", need: "Need", site: "Site | None") -> FabricPlan:
    """What lies in the folder, as the plan that put it there.

    Raises:
        MusterError: there is no fabric of the name that was asked for.
    """
    finding = survey.look(places.own, need.wanted, site)
    profile = survey.profile_of(finding)
    names = sorted(path.name for path in places.bound.iterdir())
    plugins = [name for name in (*value(profile.libraries.plugins), "libnccl-net.so") if name in names]
    plugin = plugins[0] if plugins else None
    net = elf.net_plugin(places.bound / plugin) if plugin else None
    found = survey.without_host(finding, need.num_nodes, site)
    return replace(
        found,
        injected=tuple(Injected(name, str(places.bound / name), finding.fabric, wins=True) for name in names),
        plugin=plugin,
        net=found.net or (net.name if net else None),
    )
