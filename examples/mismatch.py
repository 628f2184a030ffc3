"""A deliberate mistake: the ranks call different collectives. Without TORCH_DISTRIBUTED_DEBUG they wait for a timeout.

TORCH_DISTRIBUTED_DEBUG=DETAIL muster run mismatch.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=120))
    number = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
    if dist.get_rank() == 0:
        dist.all_reduce(number)
    else:
        dist.broadcast(number, src=0)
    print("this is never reached")


if __name__ == "__main__":
    main()
