"""Ranks by multiprocessing (--spawn), for those who learnt it so: torchrun's agent, whose workers run by runpy.

The launcher execs this module. torch.multiprocessing starts the processes, and each runs the program in the interpreter
that it already is.
"""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "--run-path")
    runpy.run_module("muster.entrypoint.agent", run_name="__main__", alter_sys=True)
