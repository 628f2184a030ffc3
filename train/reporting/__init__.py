"""What a run shows and writes: times and losses (metrics.py), the screen (display.py), logs (console.py), files
(summary.py), traces (profile.py) and other programs' trackers (trackers.py)."""
