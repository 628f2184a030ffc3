"""Options of the tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    soak = parser.getgroup("soak", "the soak test, tests/clusters/test_soak.py")
    soak.addoption("--soak-minutes", type=float, default=1.5, help="for how long it kills what it can; default: 1.5")
    soak.addoption("--soak-seed", type=int, help="of an earlier soak, to have its kills again")
