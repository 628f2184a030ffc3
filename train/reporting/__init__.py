"""What a run measures, shows and writes.

stopwatch.py and metrics.py have times and losses, display.py the screen, console.py the logs, summary.py the files of a
run, profile.py traces, trackers.py other programs that take the numbers.
"""
