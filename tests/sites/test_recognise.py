"""Recognition of the current site, from recorded environments, and from hostile names."""

from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import recording
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.sites import recognise
from muster.entrypoint.sites.recognise import Recognised
from muster.errors import MusterError
from tests.sites.profile import HEAD, TABLES, VALID, written

REFUSED = 'refused = {value = "AMD GPUs need ROCm", source = "docs"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path).parent


def here(env: Environment, folder: Path, site: str = "auto") -> Recognised | None:
    return recognise.here(env, LaunchOptions(site=site), folder)


def recorded(recordings: Path, **variables: str) -> Environment:
    env = recording.load(recordings / "slurm" / "b_srun_N2_1per.node02.1.env")
    return replace(env, variables={**env, **variables})


@pytest.mark.parametrize(
    ("variables", "host", "why"),
    [
        ({"SLURM_CLUSTER_NAME": "testbooster"}, None, "SLURM_CLUSTER_NAME=testbooster"),
        ({"SGE_CLUSTER_NAME": "TestBooster"}, "node01", "SGE_CLUSTER_NAME=TestBooster"),
        ({}, "tb001", "host tb001"),
        ({}, "TB001.testbooster.org", "host TB001.testbooster.org"),
        ({"SLURM_CLUSTER_NAME": "testbooster"}, "tb1", "SLURM_CLUSTER_NAME=testbooster, host tb1"),
    ],
)
def test_a_site_is_told_by_its_cluster_or_its_hosts(
    folder: Path, variables: dict[str, str], host: str | None, why: str
) -> None:
    found = here(Environment(variables, host), folder)
    assert found is not None
    assert (found.name, found.why, found.site.title) == ("testbooster", why, "Testbooster")


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, None),
        ({}, ""),
        ({"SLURM_CLUSTER_NAME": ""}, "node01"),
        ({"SLURM_CLUSTER_NAME": "testbooster2"}, "mytb1"),
        ({"HOSTNAME": "tb001"}, "tbx"),
        ({"SLURM_CLUSTER_NAME": "test\nbooster"}, "node.tb1"),
    ],
)
def test_other_names_are_other_sites(folder: Path, variables: dict[str, str], host: str | None) -> None:
    assert here(Environment(variables, host), folder) is None


def test_a_recording_tells_its_site(recordings: Path, tmp_path: Path) -> None:
    folder = written(tmp_path, VALID.replace('["testbooster"]', '["fake"]')).parent
    found = here(recorded(recordings), folder)
    assert found is not None
    assert found.why == "SLURM_CLUSTER_NAME=fake"
    host = written(tmp_path, VALID.replace('["tb[0-9]*"]', '["node02"]')).parent
    found = here(recorded(recordings), host)
    assert found is not None
    assert found.why == "host node02"


def test_no_recording_of_this_project_is_of_a_known_site(recordings: Path) -> None:
    """They were made on machines with ordinary names: none may be taken for a centre's machine."""
    files = [path for path in recordings.rglob("*.env") if path.parent.name != "documented"]
    assert len(files) > 100
    for path in files:
        assert recognise.here(recording.load(path), LaunchOptions()) is None, path


def test_all_of_its_variables_have_to_match(tmp_path: Path) -> None:
    line = 'recognise.variables = {value = {SYSTEM = "tb", PART = "gpu*"}, source = "docs"}\n'
    folder = written(tmp_path, HEAD + line + TABLES).parent
    assert here(Environment({"SYSTEM": "tb"}), folder) is None
    assert here(Environment({"SYSTEM": "tb", "PART": "cpu"}), folder) is None
    found = here(Environment({"SYSTEM": "tb", "PART": "gpu1"}), folder)
    assert found is not None
    assert found.why == "SYSTEM=tb, PART=gpu1"


def test_the_more_specific_of_two_wins(folder: Path, tmp_path: Path) -> None:
    written(tmp_path, VALID.replace('"tb[0-9]*"', '"tbx*"').replace("Testbooster", "Other"), name="other")
    env = Environment({"SLURM_CLUSTER_NAME": "testbooster"}, "tbx1")
    found = here(env, folder)
    assert found is not None
    assert found.name == "other"


def test_two_that_match_alike_are_both_named(folder: Path, tmp_path: Path) -> None:
    written(tmp_path, name="other")
    env = Environment({"SLURM_CLUSTER_NAME": "testbooster"}, "tb1")
    with pytest.raises(MusterError, match="this site could be other or testbooster") as refused:
        here(env, folder)
    assert "SLURM_CLUSTER_NAME=testbooster" in refused.value.seen
    assert refused.value.fix == "--site other, or --site off"
    assert here(env, folder, "off") is None
    found = here(env, folder, "testbooster")
    assert found is not None
    assert (found.name, found.why) == ("testbooster", "--site=testbooster")


def test_a_named_site_wins_over_what_is_recognised(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(VALID.replace("Testbooster", "Mine"))
    env = Environment({"SLURM_CLUSTER_NAME": "testbooster", "MUSTER_SITE": str(path)})
    found = here(env, folder, str(path))
    assert found is not None
    assert (found.name, found.why, found.site.title) == (str(path), f"MUSTER_SITE={path}", "Mine")
    with pytest.raises(MusterError, match="there is no site of this name") as refused:
        here(env, folder, "testboster")
    assert refused.value.seen == "--site=testboster"


def test_a_profile_that_an_editor_of_windows_has_saved_is_read(tmp_path: Path) -> None:
    """Such an editor writes a byte order mark before the first line."""
    path = written(tmp_path, "\ufeff" + VALID)
    found = here(Environment({"SLURM_CLUSTER_NAME": "testbooster"}), path.parent)
    assert found is not None
    named = recognise.here(Environment({}), LaunchOptions(site=str(path)))
    assert named is not None
    assert named.site.title == found.site.title


def test_only_the_head_is_read(tmp_path: Path) -> None:
    """Every launch does this: profiles of other sites are neither parsed as a whole nor checked."""
    folder = written(tmp_path, HEAD + "\n[sources]\nthis is no TOML\n").parent
    assert here(Environment({}, "node01"), folder) is None
    with pytest.raises(MusterError, match="can't be read"):
        here(Environment({}, "tb1"), folder)


def test_a_head_that_is_no_toml_is_told(tmp_path: Path) -> None:
    folder = written(tmp_path, "title = \n" + VALID).parent
    with pytest.raises(MusterError, match="can't be read") as refused:
        here(Environment({}, "node01"), folder)
    assert refused.value.fix == "correct testbooster.toml, or --site off"


@pytest.mark.parametrize(
    "head",
    ["recognise = 3", "recognise.hosts = 3", "recognise.hosts = {value = 3}", "recognise.variables = {value = ['A']}"],
)
def test_a_head_of_another_shape_is_told(tmp_path: Path, head: str) -> None:
    folder = written(tmp_path, head).parent
    with pytest.raises(MusterError, match="can't be read"):
        here(Environment({}, "3"), folder)


@pytest.mark.parametrize("host", ["tb1\n[31mx", "tb1\x1b[31m", "tb1$(reboot)", "tb1'\"; reboot", "tb1" + "a" * 5000])
def test_a_hostile_name_stays_on_its_line(folder: Path, host: str) -> None:
    found = here(Environment({}, host), folder)
    assert found is not None
    assert found.why.isprintable()


def test_a_site_that_this_image_does_not_run_at(tmp_path: Path) -> None:
    folder = written(tmp_path, HEAD + REFUSED + TABLES).parent
    found = here(Environment({}, "tb1"), folder)
    with pytest.raises(MusterError, match="does not run on Testbooster: AMD GPUs need ROCm") as refused:
        recognise.check(found)
    assert refused.value.code == 2
    assert refused.value.seen == "host tb1"
    assert "https://docs.example.org/gpu" in refused.value.fix
    assert "--site off" in refused.value.fix
    recognise.check(None)


@pytest.mark.parametrize("text", ["title = " + 5000 * "9", "a = " + 3000 * "["], ids=["digits", "brackets"])
def test_a_profile_that_python_gives_up_on_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(MusterError, match="a site's profile can't be read"):
        recognise.here(Environment({}, "host"), LaunchOptions(), tmp_path)
