"""A pytest plugin for tests/mutants.py: it records all tests and the one that runs, or runs chosen tests in order.

    python -m pytest -p tests.reached_plugin --measure FOLDER ...
    python -m pytest -p tests.reached_plugin --chosen FILE ...

The first writes FOLDER/tests.json and, in a copy whose processes are measured, coverage.py's data. The second runs the
tests that FILE lists, one a line, in that order, and writes those that fail into FILE.failed, a line of JSON each.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import reached

TESTS = "tests.json"
FIXTURE = "fixture "


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reached", "which tests reach which lines")
    group.addoption("--measure", type=Path, metavar="FOLDER")
    group.addoption("--chosen", type=Path, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.measure is not None:
        config.pluginmanager.register(Measurement(config.option.measure))
    if config.option.chosen is not None:
        config.pluginmanager.register(Choice(config.option.chosen))


class Measurement:
    """Tells coverage.py, here and in processes that tests start, which test runs, or which shared fixture."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tests: dict[str, dict[str, Any]] = {}
        self.now = ""

    def tell(self, name: str) -> str:
        """Sets `name` as what runs from now on; returns what ran until now."""
        before, self.now = self.now, name
        (self.folder / reached.NOW).write_text(name)
        if reached.running is not None:
            reached.running.switch_context(name)
        return before

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.tests[item.nodeid] = {
                "fixtures": list(getattr(item, "fixturenames", ())),
                "is_process": item.get_closest_marker("process") is not None,
                "outcomes": [],
                "seconds": 0.0,
            }

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self.tell("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        test["outcomes"].append(report.outcome)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope == "function":
            yield
            return
        before = self.tell(FIXTURE + fixturedef.argname)
        yield
        self.tell(before)

    def pytest_sessionfinish(self) -> None:
        (self.folder / TESTS).write_text(json.dumps(self.tests))


class Choice:
    """Runs only the tests that a file lists, and writes down those that fail, with their messages."""

    def __init__(self, path: Path) -> None:
        self.places = {name: place for place, name in enumerate(path.read_text().splitlines())}
        self.failed = path.with_name(f"{path.name}.failed")
        self.failed.unlink(missing_ok=True)
        self.code = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.places), key=lambda item: self.places[item.nodeid]
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(report.nodeid, report.longreprtext)

    def write(self, test: str, text: str) -> None:
        with self.failed.open("a") as file:
            file.write(json.dumps({"test": test, "text": text}) + "\n")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.code = int(exitstatus)

    def pytest_unconfigure(self) -> None:
        # A mutant may have left a thread that keeps Python from ending.
        sys.stdout.flush()
        os._exit(self.code)
