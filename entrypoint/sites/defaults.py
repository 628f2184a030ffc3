"""Defaults of a launch from its site's profile. What the user set stays, and a line says so."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from muster.entrypoint.environment import Environment
from muster.entrypoint.launch.program import Additions, where_unset
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.sites.recognise import VARIABLE, Recognised
from muster.entrypoint.sites.schema import Context, Site, resolve, value_of
from muster.interfaces import own_addresses
from muster.units import by_numbers

SOCKETS = "NCCL_SOCKET_IFNAME"


def of(found: Recognised, num_nodes: int, env: Environment, options: LaunchOptions) -> tuple[LaunchOptions, Additions]:
    """The options of a launch on `num_nodes`, with the site's where the user gave none, and the site's additions.

    The first note names the site and the values that it gave.
    """
    context = Context.here(num_nodes, env.is_live)
    with_site, of_network = _network(found.site, context, env, options) if num_nodes > 1 else (options, Additions())
    of_caches = _caches(found.site, context, env)
    variables = {**of_network.variables, **of_caches.variables, **resolve(found.site.variables, context)}
    added = where_unset(variables, env)
    given: list[str] = []
    if with_site.address_suffix != options.address_suffix:
        given.append(f"address suffix {with_site.address_suffix}")
    if of_network.variables:
        given.append(f"interface {with_site.interface or of_network.variables[SOCKETS]}")
    given += sorted(set(added.variables) - set(of_network.variables))
    line = f"site: {found.site.title} ({found.why})" + (f": {', '.join(given)}" if given else "")
    return with_site, Additions(added.variables, (line, *of_network.notes, *of_caches.notes, *added.notes))


def _network(site: Site, context: Context, env: Environment, options: LaunchOptions) -> tuple[LaunchOptions, Additions]:
    """The options with the site's address suffix and interface, and NCCL's variable for the interface."""
    notes: list[str] = []
    variables: dict[str, str] = {}
    suffix = value_of(site.network.address_suffix, context)
    if suffix and (options.address_suffix or "MUSTER_ADDRESS_SUFFIX" in env):
        notes += _kept("--address-suffix", options.address_suffix, suffix)
    elif suffix:
        options = replace(options, address_suffix=suffix)
    prefix = value_of(site.network.interface, context)
    name = interface(prefix) if prefix and env.is_live else None
    if prefix and options.interface:
        notes += _kept("--interface", options.interface, prefix)
    elif prefix and env.is_live and not name:
        notes.append(f"no interface here begins with {prefix}, as the site's do: in docker, --network=host")
    elif prefix:
        options = replace(options, interface=name)
        # NCCL takes all interfaces with the prefix; gloo and the rendezvous take one, by its whole name.
        variables[SOCKETS] = prefix
    return options, Additions(variables, tuple(notes))


def interface(prefixes: str) -> str | None:
    """The first of this host's interfaces that begins with one of the `prefixes` (hsn, or ib,eth) and has an address.

    None where there is none.
    """
    names = sorted(own_addresses(), key=by_numbers)
    of_prefix = (name for prefix in prefixes.split(",") if prefix for name in names if name.startswith(prefix))
    return next(of_prefix, None)


def expanded(folder: str, env: Mapping[str, str]) -> str | None:
    """`folder` with its variables replaced by those of `env`, without a shell; None where one is unset or empty."""
    names = [match[1] or match[2] for match in VARIABLE.finditer(folder)]
    if not all(env.get(name) for name in names):
        return None
    return VARIABLE.sub(lambda match: env[match[1] or match[2]], folder)


def _caches(site: Site, context: Context, env: Environment) -> Additions:
    found: dict[str, str] = {}
    notes: list[str] = []
    for name, value in resolve(site.caches, context).items():
        if (folder := expanded(value, env)) is None:
            continue
        if env.is_live and name not in env and not _can_be_made(Path(folder)):
            notes.append(f"{name}={folder} of the site is left out: it can't be written to here")
        else:
            found[name] = folder
    return Additions(found, tuple(notes))


def _can_be_made(folder: Path) -> bool:
    """Whether `folder` is writable, or can be made below a folder that is; the root of a container does not count."""
    there = next((each for each in (folder, *folder.parents) if os.path.exists(each)), Path("/"))
    return there != Path("/") and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _kept(name: str, yours: str, its: str) -> list[str]:
    return [f"{name}={yours} is yours: it was kept"] if yours != its else []
