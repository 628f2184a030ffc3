"""Options of all tests, and the report that tests/lanes.py reads."""

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    soak = parser.getgroup("soak", "the soak test, tests/clusters/test_soak.py")
    soak.addoption("--soak-minutes", type=float, default=1.5, help="for how long it kills what it can; default: 1.5")
    soak.addoption("--soak-seed", type=int, help="of an earlier soak, to have its kills again")


class Report:
    """Writes a line of JSON when a test starts, and one with its result."""

    def __init__(self, path: Path) -> None:
        # Opened here, as tests change their user, and what they may write.
        self.file = path.open("a", buffering=1)
        self.seconds = 0.0
        self.processors_s = 0.0

    def write(self, **record: Any) -> None:
        self.file.write(json.dumps(record) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(collected=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", seconds=0.0, text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds = 0.0
        self.processors_s = processors_s()
        self.write(starts=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.when == "call" or not report.passed:
            text = report.longreprtext
            if report.skipped and isinstance(report.longrepr, tuple):
                text = report.longrepr[2].removeprefix("Skipped: ")
            elif report.failed:
                text = "\n".join([text, *(f"--- {title}\n{content}" for title, content in report.sections)])
            seconds, own = round(self.seconds, 3), round(processors_s() - self.processors_s, 3)
            self.write(test=report.nodeid, outcome=report.outcome, seconds=seconds, processors_s=own, text=text)


def processors_s() -> float:
    """CPU seconds of this process, and of its child processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_configure(config: pytest.Config) -> None:
    # Tests are the same on a machine with GPUs: torch, not loaded yet, sees none, here and in child processes.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    path = os.environ.pop("MUSTER_TEST_REPORT", None)
    if path is not None:
        config.pluginmanager.register(Report(Path(path)))


@pytest.fixture
def as_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the test in tmp_path, as a user other than root: no folder is closed to root."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    if os.geteuid():
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("root can't be another user here")
    yield
    os.seteuid(0)
