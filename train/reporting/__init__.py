"""What a run measures, shows and writes.

metrics.py has times, memory and energy, flops.py operations, display.py the screen, console.py the logs, summary.py the
files of a run, profile.py traces, trackers.py other programs that take the numbers.
"""
