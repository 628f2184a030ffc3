"""The locks: their contents, and that the package index has a file for every machine and Python that they are for.

No wheel is downloaded: an index has name and hash of each file, and a wheel's name tells where it can be installed.
"""

import base64
import html.parser
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-cuda12.lock", "requirements-cuda12-test.lock")
PYTHONS = ((3, 11), (3, 12), (3, 13))
GLIBC_MINOR = 36
"""glibc 2.36 is Debian 12's, the older one of the systems that the image is built on."""

REQUEST_DEADLINE_S = 30
ATTEMPTS = 3


@dataclass(frozen=True)
class Pin:
    """An entry of a lock."""

    requirement: Requirement
    hashes: frozenset[str]

    @property
    def project(self) -> str:
        """Its name as an index spells it."""
        return canonicalize_name(self.requirement.name)


@dataclass(frozen=True)
class File:
    """A file, as an index describes it."""

    name: str
    sha256: str
    requires_python: str


def text_of(name: str) -> str:
    """A lock without its comments, each entry on one line."""
    lines = (ROOT / name).read_text().splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")


def pins_of(name: str) -> list[Pin]:
    """The entries of a lock."""
    pins = []
    for entry in text_of(name).splitlines():
        requirement, *hashes = entry.split(" --hash=sha256:")
        pins.append(Pin(Requirement(requirement), frozenset(found.strip() for found in hashes)))
    return pins


def environment_of(machine: str, python: tuple[int, int]) -> Environment:
    """The environment in which markers are evaluated on such a machine."""
    version = f"{python[0]}.{python[1]}"
    return Environment(
        implementation_name="cpython",
        implementation_version=f"{version}.0",
        os_name="posix",
        platform_machine=machine,
        platform_release="",
        platform_system="Linux",
        platform_version="",
        python_full_version=f"{version}.0",
        platform_python_implementation="CPython",
        python_version=version,
        sys_platform="linux",
    )


def wanted_on(name: str, machine: str, python: tuple[int, int]) -> list[Pin]:
    """The entries of a lock that are installed on such a machine."""
    environment: Any = environment_of(machine, python)
    return [
        pin for pin in pins_of(name) if pin.requirement.marker is None or pin.requirement.marker.evaluate(environment)
    ]


def tags_of(machine: str, python: tuple[int, int]) -> frozenset[Tag]:
    """The tags of wheels that can be installed on such a machine."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_MINOR, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    interpreter = f"cp{python[0]}{python[1]}"
    return frozenset(
        [*cpython_tags(python, platforms=platforms), *compatible_tags(python, interpreter, platforms=platforms)]
    )


def fits(file: File, pin: Pin, tags: frozenset[Tag], python: tuple[int, int]) -> bool:
    """Whether pip would take `file` for `pin` there."""
    if file.sha256 not in pin.hashes or not file.name.endswith(".whl"):
        return False
    _, version, _, own = parse_wheel_filename(file.name)
    return (
        bool(own & tags)
        and pin.requirement.specifier.contains(version, prereleases=True)
        and SpecifierSet(file.requires_python).contains(f"{python[0]}.{python[1]}.0")
    )


@pytest.mark.parametrize(
    ("name", "sha256", "requires_python", "does_fit"),
    [
        ("a-1.0-cp312-cp312-manylinux_2_28_aarch64.whl", "0" * 64, ">=3.11", True),
        ("a-1.0-cp311-abi3-manylinux_2_36_aarch64.whl", "0" * 64, "", True),
        ("a-1.0-py3-none-any.whl", "0" * 64, "", True),
        ("a-1.0-py3-none-any.whl", "1" * 64, "", False),
        ("a-1.0-py3-none-any.whl", "0" * 64, "<3.12", False),
        ("a-1.0-cp312-cp312-manylinux_2_37_aarch64.whl", "0" * 64, "", False),
        ("a-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "0" * 64, "", False),
        ("a-1.0-cp312-cp312-musllinux_1_2_aarch64.whl", "0" * 64, "", False),
        ("a-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", "0" * 64, "", False),
        ("a-1.1-py3-none-any.whl", "0" * 64, "", False),
        ("a-1.0.tar.gz", "0" * 64, "", False),
    ],
)
def test_what_fits(name: str, sha256: str, requires_python: str, does_fit: bool) -> None:
    pin = Pin(Requirement("a==1.0"), frozenset(["0" * 64]))
    assert fits(File(name, sha256, requires_python), pin, tags_of("aarch64", (3, 12)), (3, 12)) is does_fit


class Links(html.parser.HTMLParser):
    """The files on an index's page of one project (the simple repository API, PEP 503)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.files: list[File] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag != "a" or not values.get("href"):
            return
        address, _, fragment = str(values["href"]).partition("#")
        name = urllib.parse.unquote(address.rpartition("/")[2])
        sha256 = fragment.removeprefix("sha256=")
        self.files.append(File(name, sha256, values.get("data-requires-python") or ""))


def pip_setting(name: str) -> str:
    """The value of a setting of pip, from its files and variables; empty where it is not set."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    settings = dict(re.findall(r"^(\S+?)='(.*)'$", listed, re.MULTILINE))
    return next((settings[key] for of in (":env:", "install", "global") if (key := f"{of}.{name}") in settings), "")


def page_of(index: str, project: str, context: ssl.SSLContext) -> str:
    """An index's page of `project`; empty where it has none.

    Raises:
        OSError: the index can't be reached.
    """
    parts = urllib.parse.urlsplit(index)
    host = parts.netloc.rpartition("@")[2]
    path = f"{parts.path.rstrip('/')}/{project}/" + ("index.html" if parts.scheme == "file" else "")
    request = urllib.request.Request(parts._replace(netloc=host, path=path).geturl(), headers={"Accept": "text/html"})
    if parts.username:
        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S, context=context) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise
    except OSError:
        if parts.scheme == "file":
            return ""
        raise


def files_of(project: str, indexes: list[str], context: ssl.SSLContext) -> list[File]:
    """The files of `project` on all `indexes`."""
    for attempt in range(ATTEMPTS):
        try:
            return [file for index in indexes for file in Links(page_of(index, project, context)).files]
        except OSError:
            if attempt == ATTEMPTS - 1:
                raise
    return []


@pytest.fixture(scope="module")
def index() -> dict[str, list[File]]:
    """The files of each project in the locks, on the index that pip uses here."""
    indexes = [pip_setting("index-url") or "https://pypi.org/simple", *pip_setting("extra-index-url").split()]
    context = ssl.create_default_context(cafile=pip_setting("cert") or None)
    projects = sorted({pin.project for name in LOCKS for pin in pins_of(name)})
    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda project: files_of(project, indexes, context), projects))
    except OSError as error:
        # Only the kind: the address may hold a password.
        reason = f"the package index can't be asked: {type(error).__name__}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return dict(zip(projects, found, strict=True))


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: f"{python[0]}.{python[1]}")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", LOCKS)
def test_the_index_has_a_wheel_with_a_locked_hash_for(
    index: dict[str, list[File]], name: str, machine: str, python: tuple[int, int]
) -> None:
    wanted = wanted_on(name, machine, python)
    assert len({pin.project for pin in wanted}) == len(wanted) > 20
    tags = tags_of(machine, python)
    missing = [
        str(pin.requirement) for pin in wanted if not any(fits(file, pin, tags, python) for file in index[pin.project])
    ]
    assert not missing


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_names_versions_and_hashes_and_no_place(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()
    assert not re.search(r"[/@]|(?<!\S)-(?!-hash=sha256:)", text_of(name))
    pins = pins_of(name)
    assert len(pins) > 20
    for pin in pins:
        assert [specifier.operator for specifier in pin.requirement.specifier] == ["=="], pin
        assert pin.requirement.url is None, pin
        assert pin.hashes, pin
        assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in pin.hashes), pin


def versions_of(name: str, machine: str, python: tuple[int, int] = (3, 12)) -> dict[str, str]:
    """The versions that a lock installs, by name."""
    return {pin.project: str(pin.requirement.specifier)[2:] for pin in wanted_on(name, machine, python)}


@pytest.mark.parametrize(("runtime", "more"), [LOCKS[:2], LOCKS[2:]])
def test_the_lock_with_tools_has_the_versions_of_the_one_without(runtime: str, more: str) -> None:
    for machine in ("x86_64", "aarch64"):
        assert versions_of(runtime, machine).items() < versions_of(more, machine).items()


def test_the_locks_differ_in_nothing_but_torch_and_what_it_brings() -> None:
    newest, cuda12 = (versions_of(name, "x86_64") for name in ("requirements.lock", "requirements-cuda12.lock"))
    differing = {name for name in newest.keys() & cuda12.keys() if newest[name] != cuda12[name]}
    assert differing == {"torch", "torchvision", "triton", "cuda-bindings"}
    assert (cuda12["torch"], cuda12["torchvision"]) == ("2.10.0", "0.25.0")


def test_which_cuda_a_lock_brings() -> None:
    for machine in ("x86_64", "aarch64"):
        assert "nvidia-nccl-cu13" in versions_of("requirements.lock", machine)
    assert versions_of("requirements-cuda12.lock", "x86_64")["nvidia-cuda-runtime-cu12"].startswith("12.8.")
    # PyPI's torch 2.10.0 for arm64 is built without CUDA: there, this lock trains on CPUs alone.
    of_nvidia = [name for name in versions_of("requirements-cuda12.lock", "aarch64") if name.startswith("nvidia-")]
    assert of_nvidia == ["nvidia-ml-py"]  # which asks the driver, and needs no CUDA
