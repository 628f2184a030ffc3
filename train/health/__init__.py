"""What can go wrong with a rank, and who says so.

parent.py hears that the agent died, faults.py ends all ranks with the error of one, heartbeat.py finds silence and
hangs, preemption.py hears warnings and knows the time limit, memory.py explains memory that is used up.
"""
