"""Checks all nodes of a job before a training starts on them.

A module is a subject: `software`, `gpus`, `memory`, `storage`, `network` tell what a node has; `names`, `ports`,
`clock` and `collectives` what nodes are to each other. Each has the same face: a `NAME`, a dataclass `Facts` of
what one rank tells, `gather(world, options)`, which makes it, `findings(by_host)`, which says what is wrong in the
Facts of all ranks, and `summary(by_host)`, a line for where nothing is. `run` goes through the subjects in their
order, exchanges the facts and prints the table and the verdict; `finding` has what is common to all findings.

To add a check: a field in `Facts`, a line in `gather` that fills it, and in `findings`, say of the kernel's version,

    kernels = {host: facts[0].kernel for host, facts in by_host.items()}
    found += differences(kernels, "warning", "kernel", "kernel", "tell the site: nodes of one job should be alike")

To add a subject: a module with that face, and its name in `run.STEPS`.
"""
