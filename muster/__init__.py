"""Muster: works out where it is, and trains PyTorch there.

`entrypoint` leads from a scheduler's variables to an exec, `train` is one rank from its variables to its exit code,
`check` looks at nodes and measures their network, `report` shows what runs left. The modules beside these folders
(errors, exit codes, options) are for all of them, and load no torch.
"""
