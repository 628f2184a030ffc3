"""docker, podman and buildah behind one set of verbs: which is there, and how each is told what to build."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image.errors import output, run, succeeds
from image.settings import Settings
from train.errors import MusterError

NAMES = ("docker", "podman", "buildah")
PULL_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Engine:
    """A program that builds images and keeps them.

    Attributes:
        name: one of NAMES.
        options: words that go before every command, such as podman's `--root`.
    """

    name: str
    options: Sequence[str] = ()

    def argv(self, *words: object) -> list[str]:
        """The words of one of its commands."""
        return [self.name, *self.options, *map(str, words)]

    def has(self, image: str) -> bool:
        """Whether the image is here already."""
        return succeeds(self.argv("inspect", "--type=image", image))

    def pull(self, image: str) -> str | None:
        """None once the image is here, or what the registry answered."""
        try:
            output(self.argv("pull", "--quiet", image), timeout=PULL_TIMEOUT_S)
        except MusterError as error:
            # The end of what the engine said last, or that it did not end in time.
            return ": ".join(error.seen.partition("-> ")[2].rsplit(": ", 2)[-2:]) or error.wrong
        return None

    def import_root(self, tar: Path, image: str) -> None:
        """Makes an image of a root file system in a tar file."""
        if self.name != "buildah":
            output(self.argv("import", tar, image))
            return
        container = output(self.argv("from", "scratch"))
        try:
            output(self.argv("add", container, tar, "/"))
            output(self.argv("commit", container, image))
        finally:
            output(self.argv("rm", container))

    @property
    def can_bind(self) -> bool:
        """Whether it can show a folder of this machine to a build."""
        return self.name != "docker"

    def build(
        self,
        root: Path,
        tags: Sequence[str],
        arguments: Mapping[str, str],
        settings: Settings,
        options: Sequence[str] = (),
    ) -> None:
        """Builds ROOT/Containerfile, its messages on this terminal.

        Raises:
            MusterError: it failed.
        """
        words = ["build", "--file", str(root / "Containerfile"), *options]
        for tag in tags:
            words += ["--tag", tag]
        for name, value in arguments.items():
            words += ["--build-arg", f"{name}={value}"]
        for name, path in settings.secrets.items():
            words += ["--secret", f"id={name},src={path}"]
        environment = dict(os.environ)
        if self.name == "docker":
            environment["DOCKER_BUILDKIT"] = "1"
            words += ["--network", "host"]
            for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
                if name in environment:
                    words += ["--build-arg", name]
        else:
            # The recipe is our own: nothing to be kept apart from, and this works inside containers and sandboxes too.
            environment.setdefault("BUILDAH_ISOLATION", "chroot")
            words += ["--timestamp", arguments["SOURCE_DATE_EPOCH"], "--pull=missing", "--layers"]
            for folder, place in settings.folders.items():
                words += ["--volume", f"{folder}:{place}:ro"]
        run(self.argv(*words, str(root)), env=environment)

    def save(self, image: str, target: Path) -> str:
        """Writes the image where Apptainer can read it; returns the source in Apptainer's words."""
        if self.name == "docker":
            output(self.argv("save", "--output", target / "image.tar", image))
            return f"docker-archive:{target / 'image.tar'}"
        # buildah and podman share their images. Only buildah leaves the layers as they are: packing is in vain here.
        if shutil.which("buildah"):
            output(
                ["buildah", *self.options, "push", "--quiet", "--disable-compression", image, f"oci:{target / 'oci'}"]
            )
        else:
            output(self.argv("save", "--quiet", "--format=oci-dir", "--output", target / "oci", image))
        return f"oci:{target / 'oci'}"


def find(wanted: str = "") -> Engine:
    """The engine of that name, or the first that is there and works.

    Raises:
        MusterError: there is none, or it doesn't work.
    """
    if wanted and wanted not in NAMES:
        raise MusterError("there is no such engine", seen=f"ENGINE={wanted}", fix=f"one of {', '.join(NAMES)}")
    dead = []
    for name in [wanted] if wanted else NAMES:
        if shutil.which(name) is None:
            continue
        # docker's command may be there without its daemon.
        if succeeds([name, "info"]):
            return Engine(name)
        dead.append(f"{name}, but `{name} info` fails")
    raise MusterError(
        f"{wanted or 'a container engine'} is needed to build the image",
        seen="; ".join(dead) or f"{' nor '.join([wanted] if wanted else NAMES)} is not on PATH",
        fix="sudo apt-get install --no-install-recommends podman buildah runc, or start docker's daemon",
    )
