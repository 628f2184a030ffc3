"""Which job this process belongs to, and which of its processes it is: a file for each family of launchers.

`schedulers` asks each family's `job(env)`, `launchers` each `task(env, job)`. What they share is in `placing`.
"""
