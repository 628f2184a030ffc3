"""The variables by which a launch speaks to what it starts."""

from enum import StrEnum


class LaunchVariable(StrEnum):
    """A variable that only a launch sets. One that it inherits is another launch's, such as of the rank that submitted
    this job: it is removed, or overridden."""

    COMMAND = "MUSTER_COMMAND"
    """The command line, of our own programs."""
    SCHEDULER = "MUSTER_SCHEDULER"
    SCHEDULER_START_TIME = "MUSTER_SCHEDULER_START_TIME"
    """Unix seconds of the job, by the scheduler's own word."""
    SCHEDULER_END_TIME = "MUSTER_SCHEDULER_END_TIME"
    NODES = "MUSTER_NODES"
    """The nodes' names by node_rank, with commas."""
    SITE_FOUND = "MUSTER_SITE_FOUND"
    FABRIC_FOUND = "MUSTER_FABRIC_FOUND"
    LAUNCH = "MUSTER_LAUNCH"
    """An id of the launch, a dot, and the process id of the agent."""
    RANK_REPORTS = "MUSTER_RANK_REPORTS"
    """The folder in which ranks report to their agent, each in a file named by its process id."""
