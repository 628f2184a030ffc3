"""Inside the image's build: writes what the image is made of, for `muster version` and for whoever audits it.

    describe.py FOLDER VERSION REVISION LOCK BASE

leaves FOLDER/image.json and FOLDER/sbom.cdx.json, a bill of materials in CycloneDX 1.6. Run by the image's Python, it
lists that environment's distributions and, where there is dpkg, the system's packages.

Source: https://cyclonedx.org/docs/1.6/json/
Source: https://github.com/package-url/purl-spec/blob/main/PURL-TYPES.rst
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

# Makes the serial number a function of what is listed: the same image has the same.
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "muster/sbom")


def main(folder: str, version: str, revision: str, lock: str, base: str) -> None:
    """Writes both files into `folder`, which holds the lock as requirements.lock."""
    here = Path(folder)
    digest = hashlib.sha256((here / "requirements.lock").read_bytes()).hexdigest()
    created = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC).isoformat().replace("+00:00", "Z")
    image = {
        "version": version,
        "revision": revision,
        "lock": lock,
        "lock_sha256": digest,
        "base": base,
        "created": created,
    }
    _write(here / "image.json", image)
    _write(here / "sbom.cdx.json", bill(image, [*python_components(), *system_components(Path("/etc/os-release"))]))


def bill(image: dict[str, str], components: list[dict[str, Any]]) -> dict[str, Any]:
    """The CycloneDX document of an image with these components."""
    content = json.dumps([image, components], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, content)}",
        "version": 1,
        "metadata": {
            "timestamp": image["created"],
            "component": {
                "type": "container",
                "bom-ref": "muster",
                "name": "muster",
                "version": image["version"],
                "properties": [
                    {"name": f"muster:{name}", "value": image[name]} for name in ("revision", "lock_sha256", "base")
                ],
            },
        },
        "components": components,
    }


def python_components() -> list[dict[str, Any]]:
    """A component for each distribution in this Python's environment, sorted by name."""
    found: dict[str, dict[str, Any]] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        found[name] = _component(name, distribution.version, f"pkg:pypi/{name}@{quote(distribution.version)}")
        expression = distribution.metadata.json.get("license_expression")
        if expression:
            found[name]["licenses"] = [{"expression": expression}]
    return [found[name] for name in sorted(found)]


def system_components(os_release: Path) -> list[dict[str, Any]]:
    """A component for each package that dpkg has installed, sorted by name; none where there is no dpkg."""
    try:
        answer = subprocess.run(
            ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package} ${Version} ${Architecture}\\n"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except FileNotFoundError:
        return []
    system = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', os_release.read_text(), re.MULTILINE))
    distro = f"{system.get('ID', 'linux')}-{system.get('VERSION_ID', '')}".rstrip("-")
    found: list[dict[str, Any]] = []
    for line in sorted(set(answer.stdout.splitlines())):
        status, name, version, arch = line.split(" ")
        if status == "installed":
            purl = f"pkg:deb/{system.get('ID', 'debian')}/{name}@{quote(version)}?arch={arch}&distro={distro}"
            found.append(_component(name, version, purl))
    return found


def _component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(f"describe.py FOLDER VERSION REVISION LOCK BASE; seen: {sys.argv[1:]}, {platform.node()}")
    main(*sys.argv[1:])
