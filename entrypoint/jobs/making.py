"""The job script, or the manifest, from a site's name and a wanted job."""

from pathlib import Path

from muster.entrypoint.jobs import kubernetes, script
from muster.entrypoint.sites import profiles, recognise, schema


def make(name: str, wanted: script.Wanted, file: str | None = None) -> str:
    """The script, or the manifest, for the site whose name, or profile's file, is `name`.

    Args:
        file: the script's path, as its user will type it; None names it after the site.

    Raises:
        MusterError: there is no such profile, or the site can't run such a job.
    """
    script.check(name, wanted)
    if name not in profiles.names_in(profiles.SITES) and script.of_family(name):
        site = schema.Site(title=name, scheduler=name, status="documented")
    else:
        site = profiles.load_site(name)
    # In a job the working directory may be another one.
    known = str(Path(name).absolute()) if "/" in name or name.endswith(".toml") else name
    recognise.check(recognise.Recognised(known, f"refused in the profile {known}", site))
    if site.scheduler == "kubernetes":
        return kubernetes.make(known, site, wanted)
    usual = f"{Path(name).stem}.{script.EXTENSIONS.get(site.scheduler, 'sh')}"
    return script.script(known, site, wanted, file or usual)
