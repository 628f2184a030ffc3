"""What runs on each node beside its ranks, after the exec: torchrun's agent with what it lacks. It alone loads torch.

`__main__` is the process, with its signals and exit codes; `rendezvous` is how the agents of a launch meet; `agent`
runs the ranks, with `--spawn` by multiprocessing; `nodes` is what agents tell each other meanwhile, `failures` what the
user sees when a rank or a node has failed.
"""
