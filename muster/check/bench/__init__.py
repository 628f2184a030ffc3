"""Measures the network between the ranks, and whether it brings what was sent.

`run` meets the ranks, and prints what came of it; `sweep` goes through `collectives` and sizes, checks values and takes
the time; `transport` tells which network was used, `baseline` what is slower than before. `pairwise` measures each pair
of nodes by itself.
"""
