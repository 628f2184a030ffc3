"""Measures the network between the ranks, and checks that messages arrive unchanged.

`run` connects the ranks and prints the results; `sweep` times `collectives` at all sizes and checks their values;
`transport` finds out which network was used, `baseline` what is slower than before. `pairwise` measures each pair of
nodes by itself.
"""
