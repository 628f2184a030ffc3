"""`muster job list`: the sites that there are profiles of."""

from entrypoint.sites import profiles


def table() -> str:
    """A line for each profile: its name, its scheduler, its status, its title."""
    rows = [("SITE", "SCHEDULER", "STATUS", "SYSTEM")]
    for name in profiles.site_names():
        site = profiles.load_site(name)
        status = "refused" if site.refused is not None else site.status
        title = f"{site.title}, {site.centre}" if site.centre else f"any {site.title}"
        rows.append((name, site.scheduler, status, title))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [[*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[3]] for row in rows]
    return "\n".join("  ".join(line) for line in lines)
