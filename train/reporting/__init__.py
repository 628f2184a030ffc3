"""Reporting: what a run measures, shows and writes."""
