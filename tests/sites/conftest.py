"""The commands as processes, as in the tests of the entrypoint."""

from tests.entrypoint.conftest import command, recordings  # noqa: F401
