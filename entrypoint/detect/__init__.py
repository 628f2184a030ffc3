"""Which job this process belongs to, and which of its processes it is: a file for each family of launchers.

`resolve` asks each family's `job(env)` and `task(env, job)`, in the order of `families`. What they share: `reader` and
`hostlist` read variables, `mpi.by_rank` is for launchers that give ranks, `manual.by_host` for those that give none.
"""
