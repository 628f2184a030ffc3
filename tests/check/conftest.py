"""Fixtures: a port on which ranks connect."""

import pytest

from tests.train.conftest import free_port


@pytest.fixture
def unused_port() -> int:
    """A port on which nothing listens, below the range from which the system takes ports for outgoing connections."""
    return free_port()
