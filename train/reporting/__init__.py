"""What a run measures, shows and writes.

metrics.py has times, memory and energy, summary.py the files of a run and its operations, display.py the screen,
console.py the logs, profile.py traces, trackers.py other programs that take the numbers.
"""
