"""Packages of a Debian release, fetched from this machine's mirror and unpacked; none is installed."""

import shutil
import subprocess
from pathlib import Path

from tests.clusters.requirements import refuse, require_programs

COMMON = ("libfabric1", "libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200", "libpsm2-2", "libc6")
PACKAGES = {
    "bookworm": (*COMMON, "librdmacm1", "libpsm-infinipath1", "libatomic1", "libgcc-s1", "libuuid1", "libnuma1"),
    "trixie": (*COMMON, "librdmacm1t64", "libatomic1", "libgcc-s1", "libuuid1", "libnuma1"),
}
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def packages(suite: str, folder: Path) -> Path:
    """Fetches a release's network packages and unpacks them as if they were installed below the returned folder; skips
    the test if they can't be fetched, and with CI=true fails it."""
    require_programs("apt-get", "dpkg-deb")
    if not KEYS.exists():
        refuse(f"the keys of Debian's packages are missing: {KEYS}; fix: apt-get install debian-archive-keyring")
    for name in ("lists/partial", "archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb [signed-by={KEYS}] {_mirror()} {suite} main\n")
    _apt(suite, folder, "update")
    _apt(suite, folder, "download", *PACKAGES[suite])
    for package in sorted((folder / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, folder / "root"], check=True, timeout=240)
    # In the releases, /lib and /lib64 are links into /usr; packages of an older one have files in /lib.
    for name in ("lib", "lib64"):
        merged = folder / "root" / name
        if merged.is_dir() and not merged.is_symlink():
            shutil.copytree(merged, folder / "root/usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(merged)
        merged.symlink_to(f"usr/{name}")
    # The link that the package's own script would make.
    for psm in (folder / "root/usr/lib").glob("libpsm1/libpsm_infinipath.so.1.*"):
        (psm.parents[1] / "libpsm_infinipath.so.1").symlink_to(f"libpsm1/{psm.name}")
    shutil.rmtree(folder / "lists")
    shutil.rmtree(folder / "archives")
    return folder / "root"


def _mirror() -> str:
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    own = sorted({line for line in listed.stdout.split() if "security" not in line})
    if not own:
        refuse("apt-get knows no mirror of Debian; fix: name one in /etc/apt/sources.list.d, and run apt-get update")
    return own[0]


def _apt(suite: str, folder: Path, *words: str) -> None:
    # Own package lists, and no packages that count as installed: the machine may have another release.
    options = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": folder,
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": 2,
        "Acquire::http::Timeout": 20,
    }
    argv = ["apt-get", "--quiet", "--quiet", *(f"-o{name}={value}" for name, value in options.items()), *words]
    try:
        answer = subprocess.run(argv, cwd=folder / "archives", capture_output=True, text=True, timeout=240, check=False)
        problem = answer.stderr.strip() if answer.returncode else ""
    except subprocess.TimeoutExpired:
        problem = "no answer in 240 s"
    if problem:
        refuse(f"Debian's {suite} can't be fetched: apt-get {' '.join(words)}: {problem[-400:]}")
