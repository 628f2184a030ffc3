"""Muster detects the scheduler that it runs under, and trains PyTorch models there.

`entrypoint` leads from a scheduler's variables to an exec, `train` is one rank from its variables to its exit code,
`check` examines nodes and measures their network, `report` shows the results of runs. The modules beside these folders
(errors, exit codes, options) are shared by all of them, and load no torch.
"""
