"""Detection of this process's job and of its place in it: one file for each family of schedulers and launchers.

`resolve` asks each family's `job(env)` and `task(env, job)`, in the order of `families`. `reader` and `hostlist` read
variables for all families. `mpi.by_rank` finds the task of launchers that give ranks, `manual.by_host` of the others.
"""
