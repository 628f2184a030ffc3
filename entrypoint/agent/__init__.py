"""What runs on each node beside its ranks, after the exec: torchrun's agent with what it lacks. It alone loads torch.

`__main__` is the process, with its signals and exit codes; `agent` starts the ranks and watches them; `nodes` is what
the agents of a launch tell each other; `spawn` starts ranks by multiprocessing, without torch.
"""
