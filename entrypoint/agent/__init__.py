"""The process that starts and watches a node's ranks, after the exec: an extension of torchrun's agent.

`__main__` is the process, with its signals and exit codes; `rendezvous` lets the agents of a launch meet; `agent` runs
the ranks, with `--spawn` by multiprocessing; `nodes` exchanges heartbeats and failures between the agents; `failures`
makes the errors that the user sees. No other folder of entrypoint/ loads torch.
"""
