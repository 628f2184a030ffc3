"""Checks all nodes of a job before a training starts on them.

Each module checks one subject: `software`, `gpus`, `memory`, `storage` and `network` describe a node; `names`, `ports`,
`clock` and `collectives` describe how nodes work together. All have the same interface: a `NAME`; a dataclass `Facts`
of what one rank reports; `gather(world, options)`, which returns the facts of this rank; `findings(by_host)`, which
returns what is wrong in the facts of all ranks; and `summary(by_host)`, a line for when nothing is wrong. `run` goes
through them in order, exchanges the facts and prints the table and the verdict; `finding` has what all findings share.

To add a check: a field in `Facts`, a line in `gather` that fills it, and in `findings`, here for the kernel's version,

    kernels = {host: facts[0].kernel for host, facts in by_host.items()}
    found += differences(kernels, "warning", "kernel", "kernel", "tell the site: nodes of one job should be alike")

To add a subject: a module with that interface, and its name in `run.STEPS`.
"""
