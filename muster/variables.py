"""Communication between a launch and the ranks that it starts: the launch's variables, and the ranks' reports."""

from enum import StrEnum


class LaunchVariable(StrEnum):
    """A variable that only a launch sets. An inherited one is another launch's, such as that of the rank that submitted
    this job: it is removed, or overridden."""

    COMMAND = "MUSTER_COMMAND"
    """The command line of the launch; set only for our own programs."""
    SCHEDULER = "MUSTER_SCHEDULER"
    SCHEDULER_START_TIME = "MUSTER_SCHEDULER_START_TIME"
    """When the job started, in Unix seconds, as the scheduler reports it."""
    SCHEDULER_END_TIME = "MUSTER_SCHEDULER_END_TIME"
    NODES = "MUSTER_NODES"
    """The nodes' names in the order of node_rank, with commas between."""
    SITE_FOUND = "MUSTER_SITE_FOUND"
    FABRIC_FOUND = "MUSTER_FABRIC_FOUND"
    """The fabric's name, for the summary.json of a run."""
    LAUNCH = "MUSTER_LAUNCH"
    """An id of the launch, a dot, and the process id of the agent."""
    RANK_VARIABLES = "MUSTER_RANK_VARIABLES"
    """The job's id and the variables given to a rank that no agent starts, with blanks between: 1234 RANK=0 ..."""
    REFUSAL = "MUSTER_REFUSAL"
    """Why this node can't take part in the launch, as JSON (`MusterError.parts`), for the agents of the others."""
    RANK_REPORTS = "MUSTER_RANK_REPORTS"
    """The folder in which ranks report to their agent, each in a file named by its process id."""


class RankReport(StrEnum):
    """The lines that a rank's report may have after the first one, which is the path of its log."""

    ERROR_SHOWN = "error shown"
    """The user was shown why the rank ends."""
    HAS_CHECKPOINT = "has checkpoint"
    """The run can go on from a checkpoint."""
