"""Detects and reports what ends a run early: a dead launcher, errors of ranks, hangs, preemption, exhausted memory."""
