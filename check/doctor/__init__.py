"""Looks at all nodes of a job before a training does."""
