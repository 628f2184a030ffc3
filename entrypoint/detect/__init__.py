"""Which job this process belongs to, and which of its processes it is: a file for each family of launchers.

`resolve` asks each family's `job(env)` and `task(env, job)`. What they share is in `placing`.
"""
