"""What `--debug-distributed` sets: the variables by which torch and NCCL tell what they do.

Sources, of what each does:
    TORCH_DISTRIBUTED_DEBUG, TORCH_CPP_LOG_LEVEL: https://docs.pytorch.org/docs/stable/distributed.html
    TORCH_LOGS: https://docs.pytorch.org/docs/stable/logging.html
    TORCH_NCCL_*: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    TORCH_FR_*: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    NCCL_DEBUG*: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

import re
from collections.abc import Mapping
from pathlib import Path

from muster.entrypoint.launch.program import Additions, Folder, where_unset


def find(env: Mapping[str, str], rdzv_id: str, *, has_gpus: bool) -> Additions:
    """The variables that the user has not set, and the folder, one for all nodes, for what is written to files."""
    folder = Path.cwd() / "runs" / f"debug-{re.sub(r'[^A-Za-z0-9._-]+', '-', rdzv_id).strip('.-')}"
    # NCCL reads % in the file's name.
    logs = f"{str(folder).replace('%', '%%')}/nccl.%h.%p.log"
    wanted = {
        # DETAIL: the ranks compare each collective before it runs, and the first that differs is an error and no hang.
        # Over gloo DistributedDataParallel crashes with it as it is made (torch 2.10 and 2.15: SIGSEGV, seen by us).
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if has_gpus else "INFO",
        "TORCH_LOGS": "distributed",
        # With INFO, and DETAIL, every call of a store is a line, and the agents ask theirs each second.
        "TORCH_CPP_LOG_LEVEL": "WARNING",
        # How many collectives the flight recorder keeps of each rank; 2000 by default.
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/flight_rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DESYNC_DEBUG": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": logs,
    }
    found = where_unset(wanted, env)
    where = f"--debug-distributed: what NCCL says, and what the flight recorder keeps, goes to {folder}"
    # NCCL does not make it.
    made = Folder(folder, "--debug-distributed writes files: start in a folder that you may write to")
    return Additions(found.variables, (where, *found.notes), folders=(made,))
