"""From the scheduler's variables to an exec: pure functions over a mapping, without torch."""
