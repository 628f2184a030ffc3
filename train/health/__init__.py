"""What can go wrong with a rank, and who says so: the parent that died (parent.py), errors of one rank that end all
(faults.py), silence and hangs (heartbeat.py), warnings and time limits (preemption.py), memory (memory.py)."""
