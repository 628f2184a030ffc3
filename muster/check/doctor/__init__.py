"""Checks all nodes of a job before a training starts on them.

`run` gathers the facts of each rank and node, one file a subject (`software`, `gpus`, `resources`,
`network`), whose `findings` compare the nodes. `names`, `ports`, `clock` and `collectives` are checked by the ranks
together. `report` prints what was found.
"""
