"""The first sites with a profile, recognised by names and variables that their profiles' sources show."""

import pytest

from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.sites import profiles, recognise
from muster.errors import MusterError

FIRST = {
    *("derecho", "juwels-booster", "jureca", "jupiter", "capella", "alpha", "perlmutter", "polaris"),
    *("frontier", "lumi", "leonardo", "alps", "isambard-ai"),
}


def test_the_first_sites_are_there() -> None:
    assert set(profiles.names_in(profiles.SITES)) >= FIRST
    assert set(profiles.names_in(profiles.FABRICS)) == {"infiniband", "slingshot", "efa", "tcp"}


@pytest.mark.parametrize(
    ("name", "variables", "host"),
    [
        ("derecho", {"LMOD_SYSTEM_NAME": "derecho"}, None),
        ("derecho", {}, "derecho3"),
        ("derecho", {}, "deg0037.hsn.de.hpc.ucar.edu"),
        ("juwels-booster", {}, "jwb0001.juwels"),
        ("juwels-booster", {"SYSTEMNAME": "juwelsbooster"}, None),
        ("jureca", {"SYSTEMNAME": "jurecadc"}, None),
        ("jupiter", {}, "jpbo-001-01.jupiter.internal"),
        ("capella", {}, "c1.capella.hpc.tu-dresden.de"),
        ("alpha", {}, "i8001.alpha.hpc.tu-dresden.de"),
        ("perlmutter", {"NERSC_HOST": "perlmutter"}, "nid001012"),
        ("polaris", {}, "polaris-login-01"),
        ("frontier", {"LMOD_SYSTEM_NAME": "frontier"}, None),
        ("lumi", {"SLURM_CLUSTER_NAME": "lumi"}, "nid005001"),
        ("leonardo", {}, "login02.leonardo.cineca.it"),
        ("leonardo", {}, "login02.leonardo.local"),
        ("leonardo", {}, "lrdn0271.leonardo.local"),
        ("alps", {}, "clariden-ln001"),
        ("alps", {}, "santis-ln001"),
        ("isambard-ai", {"PROJECTDIR_PUBLIC": "/projects/public/brics"}, "nid001012"),
    ],
)
def test_a_known_site_is_recognised(name: str, variables: dict[str, str], host: str | None) -> None:
    found = recognise.here(Environment(variables, host), LaunchOptions())
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "host", ["node01", "gpu-a1", "nid001012", "cn001.cluster.local", "ip-10-0-0-7", "laptop", "c1"]
)
def test_common_host_names_match_no_site(host: str) -> None:
    assert recognise.here(Environment({"SLURM_CLUSTER_NAME": "cluster"}, host), LaunchOptions()) is None


@pytest.mark.parametrize("name", ["frontier", "lumi"])
def test_where_gpus_are_another_makers_nothing_is_started(name: str) -> None:
    found = recognise.here(Environment({}), LaunchOptions(site=name))
    with pytest.raises(MusterError, match="ROCm") as refused:
        recognise.check(found)
    assert refused.value.code == 2
