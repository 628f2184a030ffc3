"""How a launch and the ranks that it starts inform each other: its variables, and their reports."""

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
    """The fabric's name, which a run's summary.json has."""
    LAUNCH = "MUSTER_LAUNCH"
    """An id of the launch, a dot, and the process id of the agent."""
    RANK_VARIABLES = "MUSTER_RANK_VARIABLES"
    """The job's id, and what a rank that no agent starts is given, as NAME=VALUE: RANK, MASTER_ADDR; between blanks."""
    REFUSAL = "MUSTER_REFUSAL"
    """Why this node can't take part in the launch, as JSON (`MusterError.parts`), for the agents of the others."""
    RANK_REPORTS = "MUSTER_RANK_REPORTS"
    """The folder in which ranks report to their agent, each in a file named by its process id."""


class RankReport(StrEnum):
    """The lines that a rank's report may have after the first one, which is the path of its log."""

    ERROR_SHOWN = "error shown"
    """The user has read why the rank ends."""
    HAS_CHECKPOINT = "has checkpoint"
    """The run can go on from a checkpoint."""
