"""The profiles of this project: each is valid, and matches only its own site's hosts."""

import re
import tomllib
from pathlib import Path

import pytest

from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.sites import profiles, recognise
from muster.entrypoint.sites.profiles import FABRICS, SITES
from muster.entrypoint.sites.schema import Context, Fabric, Fact, Libraries, Site, When
from muster.paths import ROOT
from tests.sites.profile import VALID, problems, written

ALL_SITES = sorted(SITES.glob("*.toml"))
ALL_FABRICS = sorted(FABRICS.glob("*.toml"))


def names(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", ALL_SITES, ids=names)
def test_a_site_is_valid(path: Path) -> None:
    site = profiles.load_site(path.stem)
    assert site == profiles.load_site(path)
    assert site.extends is None or site.extends in profiles.names_in(profiles.FABRICS)


@pytest.mark.parametrize("path", ALL_FABRICS, ids=names)
def test_a_fabric_is_valid(path: Path) -> None:
    assert profiles.load_fabric(path.stem) == profiles.fabrics()[path.stem]


@pytest.mark.parametrize("path", ALL_SITES, ids=names)
def test_a_sites_head_tells_what_it_is_recognised_by(path: Path) -> None:
    text = path.read_text()
    head = tomllib.loads(recognise.head(text))
    assert head.get("recognise") == tomllib.loads(text).get("recognise")
    assert "sources" not in head


@pytest.mark.parametrize("path", ALL_SITES, ids=names)
def test_a_centres_site_can_be_recognised_and_a_generic_one_is_nobodys(path: Path) -> None:
    site = profiles.load_site(path)
    has_any = any((site.recognise.cluster, site.recognise.hosts, site.recognise.variables))
    assert has_any == bool(site.centre), "a profile without a centre would take the place of the real ones"


@pytest.mark.parametrize("path", ALL_SITES, ids=names)
def test_no_other_sites_hosts_are_taken_for_this_one(path: Path) -> None:
    """A host name made from one of the site's patterns, without other evidence, matches no other site."""
    found = profiles.load_site(path).recognise
    for pattern in found.hosts.value if found.hosts else ():
        host = pattern.replace("[0-9]", "7").replace("*", "01").replace("?", "1")
        site = recognise.here(Environment({}, host), LaunchOptions())
        assert site is None or site.name == path.stem, host


@pytest.mark.parametrize("path", ALL_SITES, ids=names)
def test_counts_of_infiniband_fit_into_its_fields(path: Path) -> None:
    """Retry counts have 3 bits: adapters take 10 as 2, below NCCL's default of 7. NCCL documents timeouts up to 22."""
    variables = profiles.load_site(path).variables
    for name, most in (("NCCL_IB_RETRY_CNT", 7), ("NCCL_IB_TIMEOUT", 22)):
        assert name not in variables or int(str(variables[name].value)) <= most


def test_the_head_ends_at_the_first_table() -> None:
    assert recognise.head(VALID) == VALID.partition("\n[sources]")[0] + "\n"
    assert recognise.head("[a]\nb = 1\n") == ""
    assert recognise.head('a = 1\nb = [\n  "[c]",\n]\n') == 'a = 1\nb = [\n  "[c]",\n]\n'


def test_names_are_the_files(tmp_path: Path) -> None:
    written(tmp_path, name="zeta")
    folder = written(tmp_path, name="alpha").parent
    assert profiles.names_in(folder) == ("alpha", "zeta")
    assert profiles.names_in(tmp_path / "fabrics") == ("infiniband",)
    assert profiles.load_site("zeta", folder, tmp_path / "fabrics").title == "Testbooster"
    assert set(profiles.fabrics(tmp_path / "fabrics")) == {"infiniband"}


def fact(*words: str) -> Fact[tuple[str, ...]]:
    return Fact(value=words, source="docs")


def test_a_sites_libraries_take_the_place_of_its_fabrics() -> None:
    fabric = Fabric(
        title="F", status="documented", is_rdma=True, libraries=Libraries(plugins=fact("a.so"), roots=fact("b.so.1"))
    )
    site = Site(title="S", scheduler="slurm", status="documented", libraries=Libraries(plugins=fact("c.so")))
    assert profiles.libraries(site, fabric, Context(1)) == Libraries(plugins=fact("c.so"), roots=fact("b.so.1"))
    assert profiles.libraries(None, fabric, Context(1)) == fabric.libraries


def test_a_sites_variables_win_where_they_hold() -> None:
    def value(text: str, nodes: str | None = None) -> Fact[str]:
        return Fact(value=text, source="docs", when=When(nodes=nodes) if nodes else None)

    fabric = Fabric(title="F", status="documented", is_rdma=True, variables={"A": value("1"), "B": value("2")})
    site = Site(title="S", scheduler="slurm", status="documented", variables={"B": value("3", ">1"), "C": value("4")})
    assert profiles.variables(site, fabric, Context(2)) == {"A": "1", "B": "3", "C": "4"}
    assert profiles.variables(site, fabric, Context(1)) == {"A": "1", "B": "2", "C": "4"}
    assert profiles.variables(None, fabric, Context(1)) == {"A": "1", "B": "2"}


def test_the_page_on_sites_ends_with_a_valid_profile(tmp_path: Path) -> None:
    """The page's blocks of TOML, joined in their order, are the file that its reader writes."""
    page = (ROOT / "docs" / "sites.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "mysite.toml"
    path.write_text("\n".join(blocks))
    site = profiles.load_site(path)
    assert f"\n{site.title}, {site.centre} (mysite.toml)\n" in page
    env = Environment({"SLURM_CLUSTER_NAME": "mycluster"}, "gpu01")
    assert f"this site: {', '.join(recognise.evidence_for(path, env))}\n" in page
    tables = {name for name in Site.__struct_fields__ if f"| `{name}` |" in page}
    described = {
        "title",
        "centre",
        "scheduler",
        "status",
        "extends",
        "documentation",
        "contact",
        "sources",
        "recognise",
    }
    assert tables == set(Site.__struct_fields__) - described


def test_the_page_on_sites_shows_what_is_said_of_faults(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sites.md").read_text()
    faults = VALID.replace("address_suffix", "adress_suffix")
    assert all(f" seen: mysite.toml: {problem}\n" in page for problem in problems(tmp_path, faults))
