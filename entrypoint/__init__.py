"""The launcher, from the scheduler's variables to an exec: pure functions over a mapping. Only agent/ loads torch."""
