"""Fixtures: a port for ranks to meet at."""

import pytest

from tests.train.conftest import free_port


@pytest.fixture
def unused_port() -> int:
    """A port nobody listens on, below the range from which the system gives ports to outgoing connections."""
    return free_port()
