"""The SIF, as users start it."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sif:
    """A SIF and the Apptainer that runs it."""

    apptainer: str
    path: Path

    def argv(self, *words: object, options: Sequence[object] = (), verb: str = "exec") -> list[str]:
        """The words of `apptainer exec OPTIONS SIF WORDS...`."""
        return [self.apptainer, verb, *map(str, options), str(self.path), *map(str, words)]

    def env(self, **more: str) -> dict[str, str]:
        """The variables of a fresh login, and the one that Apptainer needs in a sandbox, as in image/sif.sh."""
        bounding = re.search(r"^CapBnd:\t(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        kept = {}
        if os.geteuid() == 0 and bounding and not int(bounding[1], 16) >> 24 & 1:
            kept["APPTAINER_DROP_CAPS"] = "CAP_SYS_RESOURCE"
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **kept, **more}

    def run(
        self,
        *words: object,
        options: Sequence[object] = (),
        verb: str = "exec",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 400,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the SIF to its end, whatever its exit code."""
        return subprocess.run(
            self.argv(*words, options=options, verb=verb),
            cwd=cwd,
            env=self.env(**(env or {})),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
