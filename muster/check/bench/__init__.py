"""Measures the network between the ranks, and whether it brings what was sent.

`run` meets the ranks; `sweep` goes through `collectives` and sizes, checks values and takes the time; `transport`
tells which network was used, `baseline` what is slower than before, `report` what is said. `pairwise` measures each
pair of nodes by itself.
"""
