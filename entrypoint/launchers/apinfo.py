"""The binary file that PALS_APINFO names: which host each process of a Cray launch runs on.

A header in the machine's own layout gives, for each table of records, their size, the place of the first and their
number. Versions 1 and 5 differ in what follows `nnics` and in the tables for networks, not in nodes and processes.

    int version; size_t total_size; size_t comm_profile_size, comm_profile_offset; int ncomm_profiles;
    size_t cmd_size, cmd_offset; int ncmds; size_t pe_size, pe_offset; int npes;
    size_t node_size, node_offset; int nnodes; size_t nic_size, nic_offset; int nnics;
    process: int localidx, cmdidx, nodeidx;      node: int nid; char hostname[64];

Source: https://github.com/SchedMD/slurm/blob/master/src/plugins/mpi/cray_shasta/apinfo.c (version 1)
Source: https://github.com/flux-framework/flux-coral2/tree/master/src/common/libapinfo (versions 1 and 5)
"""

import struct
from dataclasses import dataclass

from entrypoint import hostlist

VERSIONS = (1, 5)
MAX_RECORDS = 10_000_000

# `i4x` is an int and the gap before the next size_t. All machines with PALS are little-endian.
_HEADER = struct.Struct("<i4xQ QQi4x QQi4x QQi4x QQi4x QQi4x")
_PROCESS = struct.Struct("<iii")
_NODE = struct.Struct("<i64s")


class ApinfoError(ValueError):
    """A file that can't be an apinfo file; the message says why."""


@dataclass(frozen=True)
class Apinfo:
    """What the file says.

    Attributes:
        hosts: the name of each node, by PALS_NODEID.
        processes: for each process, by PALS_RANKID: its node and its place there.
    """

    hosts: tuple[str, ...]
    processes: tuple[tuple[int, int], ...]

    @property
    def tasks_per_node(self) -> tuple[int, ...]:
        """How many processes each node runs."""
        counts = [0] * len(self.hosts)
        for node, _ in self.processes:
            counts[node] += 1
        return tuple(counts)


def parse(data: bytes) -> Apinfo:
    """The content of an apinfo file.

    Raises:
        ApinfoError: another version, a table outside of the file, a node or name that can't be.
    """
    if len(data) < _HEADER.size:
        raise ApinfoError(f"{len(data)} bytes are too few for a header")
    header = _HEADER.unpack_from(data)
    version, total_size = header[:2]
    if version not in VERSIONS:
        raise ApinfoError(f"version {version}, known are 1 and 5")
    if total_size > len(data):
        raise ApinfoError(f"{len(data)} of {total_size} bytes are there")
    pe_size, pe_offset, num_pes, node_size, node_offset, num_nodes = header[8:14]
    hosts: list[str] = []
    for record in _records(data, _NODE, node_size, node_offset, num_nodes):
        name = bytes(record[1]).split(b"\0", 1)[0].decode("ascii", "replace")
        if not hostlist.is_name(name):
            raise ApinfoError(f"{name!r} is no host name")
        hosts.append(name)
    processes = tuple(
        (int(node), int(local)) for local, _, node in _records(data, _PROCESS, pe_size, pe_offset, num_pes)
    )
    if any(not (0 <= node < len(hosts) and local >= 0) for node, local in processes):
        raise ApinfoError("a process is on a node that is not there")
    if len(set(hosts)) != len(hosts) or len(set(processes)) != len(processes):
        raise ApinfoError("a node or a process comes twice")
    return Apinfo(tuple(hosts), processes)


def _records(data: bytes, layout: struct.Struct, size: int, offset: int, count: int) -> list[tuple[int | bytes, ...]]:
    """The records of one table; they may be longer than what is known of them."""
    if (
        not 1 <= count <= MAX_RECORDS
        or size < layout.size
        or offset < _HEADER.size
        or offset + size * count > len(data)
    ):
        raise ApinfoError(f"{count} records of {size} bytes at {offset} do not fit into {len(data)} bytes")
    return [layout.unpack_from(data, offset + size * index) for index in range(count)]
