"""What a site's profile gives to a launch: defaults only. What the user set stays, and a line says so."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from muster.entrypoint.environment import Environment
from muster.entrypoint.launch.program import where_unset
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import network
from muster.entrypoint.sites.recognise import VARIABLE, Recognised

if TYPE_CHECKING:
    from muster.entrypoint.sites.schema import Context, Site

SOCKETS = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Defaults:
    """What a launch gets of its site.

    Attributes:
        options: the user's, with the site's where the user gave none.
        variables: those to set.
        notes: one line for each thing that the user should know; the first names the site.
        sources: for `address_suffix` and `interface`, where they are the site's, the profile.
        given: those two in words.
    """

    options: LaunchOptions
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    given: tuple[str, ...] = ()


def of(found: Recognised, num_nodes: int, env: Environment, options: LaunchOptions) -> Defaults:
    """What the site gives to a launch on `num_nodes`."""
    # Here and not above, as in `recognise`: elsewhere there is no site.
    from muster.entrypoint.sites.schema import Context, resolve

    context = Context.here(num_nodes, env.is_live)
    net = _network(found, context, env, options) if num_nodes > 1 else Defaults(options)
    caches, notes = _caches(found.site, context, env)
    wanted = {**net.variables, **caches, **resolve(found.site.variables, context)}
    added = where_unset(wanted, env)
    given = [*net.given, *sorted(set(added.variables) - set(net.variables))]
    line = f"site: {found.site.title} ({found.why})" + (f": {', '.join(given)}" if given else "")
    return replace(net, variables=added.variables, notes=(line, *net.notes, *notes, *added.notes))


def _network(found: Recognised, context: "Context", env: Environment, options: LaunchOptions) -> Defaults:
    """The way to the other nodes, as options."""
    from muster.entrypoint.sites.schema import value_of

    notes: list[str] = []
    sources: dict[str, str] = {}
    given: list[str] = []
    variables: dict[str, str] = {}
    told = f"the profile {found.name}"
    suffix = value_of(found.site.network.address_suffix, context)
    if suffix and (options.address_suffix or "MUSTER_ADDRESS_SUFFIX" in env):
        notes += _kept("--address-suffix", options.address_suffix, suffix)
    elif suffix:
        options, sources["address_suffix"] = replace(options, address_suffix=suffix), told
        given.append(f"address suffix {suffix}")
    prefix = value_of(found.site.network.interface, context)
    name = interface(prefix) if prefix and env.is_live else None
    if prefix and options.interface:
        notes += _kept("--interface", options.interface, prefix)
    elif prefix and env.is_live and not name:
        notes.append(f"no interface here begins with {prefix}, as the site's do: in docker, --network=host")
    elif prefix:
        options, sources["interface"] = replace(options, interface=name), told
        # NCCL takes all interfaces with the prefix; gloo, and the ranks' meeting, one by its whole name.
        variables[SOCKETS] = prefix
        given.append(f"interface {name or prefix}")
    return Defaults(options, variables, tuple(notes), sources, tuple(given))


def interface(prefixes: str) -> str | None:
    """The first of this host's interfaces that begins with one of the `prefixes` (hsn, or ib,eth) and has an address.

    None where there is none.
    """
    names = sorted(psutil.net_if_addrs(), key=_naturally)
    for prefix in prefixes.split(","):
        for name in names:
            if prefix and name.startswith(prefix) and network.address_of(name):
                return name
    return None


def expanded(folder: str, env: Mapping[str, str]) -> str | None:
    """`folder` with the variables of `env` in it, and no shell asked; None where one is not set, or empty."""
    names = [match[1] or match[2] for match in VARIABLE.finditer(folder)]
    if not all(env.get(name) for name in names):
        return None
    return VARIABLE.sub(lambda match: env[match[1] or match[2]], folder)


def _naturally(name: str) -> tuple[object, ...]:
    # Text and numbers in turn, so that ib2 comes before ib10.
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", name)))


def _caches(site: "Site", context: "Context", env: Environment) -> tuple[dict[str, str], list[str]]:
    from muster.entrypoint.sites.schema import resolve

    found: dict[str, str] = {}
    notes: list[str] = []
    for name, value in resolve(site.caches, context).items():
        folder = expanded(value, env)
        if folder is None:
            continue
        if env.is_live and name not in env and not _can_be_made(Path(folder)):
            notes.append(f"{name}={folder} of the site is left out: there is no such place here that can be written to")
        else:
            found[name] = folder
    return found, notes


def _can_be_made(folder: Path) -> bool:
    """Whether `folder` is writable, or can be made below a folder that is; the root of a container does not count."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    return there != Path("/") and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _kept(name: str, yours: str, its: str) -> list[str]:
    return [f"{name}={yours} is yours: it was kept"] if yours != its else []
