"""Judges the network that was chosen, and the fabric's devices."""

from check.doctor.facts import Facts, values
from check.doctor.findings import Finding, Part
from check.doctor.odd import all_of, differences


def judge(facts: Facts) -> Part:
    """The network that was chosen, and the fabric's devices."""
    found: list[Finding] = []
    for node in facts.nodes:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            wanted = node.variables.get(name, "")
            # NCCL also takes prefixes, and what is to be left out: only plain names are held against what is there.
            missing = [each for each in wanted.removeprefix("=").split(",") if each not in (*node.interfaces, "lo", "")]
            if name.startswith("GLOO") and missing:
                seen = f"{name}={wanted}; here: {', '.join(node.interfaces) or 'none'}"
                fix = f"unset {name}, or --interface with the name of an interface that all nodes have"
                found.append(Finding("fault", "interface", node.host, "the interface does not exist", seen, fix))
        if node.closed:
            wrong = "this user may not open the fabric's devices"
            fix = "docker run --device /dev/infiniband; on a node: the devices' permissions"
            found.append(Finding("warning", "fabric", node.host, wrong, ", ".join(node.closed), fix))
    several = len(facts.nodes) > 1
    alone = [rank for rank in facts.ranks if several and (rank.address or "").startswith("127.") and rank.rank]
    for host in dict.fromkeys(rank.host for rank in alone if rank.host != facts.ranks[0].host):
        wrong = "its way to rank 0 is the loopback: it would meet itself"
        rank = facts.on(host)[0]
        seen = f"own address towards rank 0: {rank.address}"
        found.append(Finding("fault", "address", host, wrong, seen, "--master-addr with an address that others reach"))
    fix = "look at what `muster fabric find` says on that node, and whether the host's libraries are bound there too"
    found += differences(values(facts, lambda node: node.fabric), "fault", "fabric", "fabric", fix)
    up = values(facts, lambda node: sum(port.state == "ACTIVE" for port in node.ports) if node.ports else None)
    fix = "tell the site: a link of that node is down (ibstat)"
    found += differences(up, "warning", "ports", "number of active InfiniBand ports", fix)
    chosen = all_of([rank.interface for rank in facts.ranks]) or "-"
    return Part("network", f"{all_of([node.fabric for node in facts.nodes]) or 'tcp'} by {chosen}", found)
