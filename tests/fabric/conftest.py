"""A host and an image to put libraries into, and the libraries of two releases of Debian."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fabric import nodes
from tests.fabric.debian import PACKAGES, packages
from tests.fabric.trees import Tree


@pytest.fixture
def host(tmp_path: Path) -> Tree:
    """An empty host."""
    return Tree(tmp_path / "host")


@pytest.fixture
def image(tmp_path: Path) -> Tree:
    """An empty image."""
    return Tree(tmp_path / "image")


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The roots with the packages of Debian's releases, by name; fetched at the same time."""
    folders = {name: tmp_path_factory.mktemp(name) for name in PACKAGES}
    with ThreadPoolExecutor() as threads:
        return dict(zip(folders, threads.map(packages, folders, folders.values()), strict=True))


@pytest.fixture(scope="session")
def bookworm(releases: dict[str, Path]) -> Path:
    """The network libraries of Debian 12, with its C library."""
    return releases["bookworm"]


@pytest.fixture(scope="session")
def trixie(releases: dict[str, Path]) -> Path:
    """The network libraries of Debian 13, with its C library."""
    return releases["trixie"]


@pytest.fixture(scope="session")
def slingshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a host with Slingshot; not to be changed."""
    return nodes.host(tmp_path_factory.mktemp("slingshot"))
