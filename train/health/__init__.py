"""Detects and reports causes of an early end: a dead launcher, errors of ranks, hangs, preemption, exhausted memory."""
