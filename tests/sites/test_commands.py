"""`muster site`, and the effects of a site on other commands, as processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entrypoint.conftest import Run
from tests.entrypoint.test_cli import three_lines
from tests.sites.profile import VALID, written

WIDTH = {"COLUMNS": "80"}


@pytest.fixture
def recording(recordings: Path) -> str:
    return str(recordings / "slurm" / "b_srun_N2_1per.node02.1.env")


def test_a_profile_is_shown_with_its_sources(command: Run, tmp_path: Path) -> None:
    path = written(tmp_path)
    answer = command("muster", "site", str(path))
    assert answer.returncode == 0, answer.stderr
    heading, _, profile = answer.stdout.partition("\n\n")
    assert heading.startswith(f"Testbooster, Somewhere ({path})\nstatus: documented, ")
    assert profile == VALID


def test_a_profile_for_programs(command: Run, tmp_path: Path) -> None:
    found = json.loads(command("muster", "site", str(written(tmp_path)), "--json").stdout)
    assert found["network"]["address_suffix"] == {"value": "i", "source": "docs", "when": None, "note": ""}
    assert found["sources"]["docs"] == {"url": "https://docs.example.org/gpu", "read": "2026-01-31"}
    assert found["why"] is None


def test_where_the_image_can_not_run_nothing_is_started(command: Run) -> None:
    answer = command("train", "ddp", "--dry-run", "--site=frontier")
    assert (answer.returncode, answer.stdout) == (2, "")
    wrong, seen, _ = three_lines(answer.stderr)
    assert "ROCm" in wrong
    assert seen == "--site=frontier"


def test_where_no_site_is_recognised(command: Run, recording: str) -> None:
    answer = command("muster", "site", "--env-file", recording)
    assert answer.returncode == 0, answer.stderr
    assert "there is no profile of this site (host node02, SLURM_CLUSTER_NAME=fake)" in answer.stdout
    assert command("muster", "site", "--env-file", recording, "--json").stdout == "null\n"


def test_a_recording_by_env_names_no_host(command: Run, tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text("SLURM_CLUSTER_NAME=fake\n")
    answer = command("muster", "site", "--env-file", str(file))
    assert "there is no profile of this site (host unknown, SLURM_CLUSTER_NAME=fake)" in answer.stdout


def test_a_file_tells_whether_this_is_its_site(command: Run, tmp_path: Path, recording: str) -> None:
    path = written(tmp_path, VALID.replace('["testbooster"]', '["fake"]'))
    answer = command("muster", "site", str(path), "--env-file", recording)
    assert answer.returncode == 0, answer.stderr
    assert "this site: SLURM_CLUSTER_NAME=fake" in answer.stdout


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_file_with_faults_is_refused_with_each_of_them(command: Run, tmp_path: Path, option: list[str]) -> None:
    path = written(tmp_path, VALID.replace("Testbooster", " ").replace('"infiniband"', '"infinband"'))
    answer = command("muster", "site", str(path), *option)
    assert (answer.returncode, answer.stdout) == (2, "")
    wrong, seen, fix = three_lines(answer.stderr)
    assert wrong == "the profile can't be used"
    assert seen.startswith(f'{path}: extends: there is no fabric "infinband"')
    assert seen.endswith("title: is empty")
    assert f"correct {path.name}" in fix


@pytest.mark.parametrize(("name", "words"), [("juwels-boster", "juwels-booster"), ("none.toml", "muster site list")])
def test_a_name_or_file_that_is_not_there_is_told_with_those_that_are(command: Run, name: str, words: str) -> None:
    answer = command("muster", "site", name)
    assert (answer.returncode, answer.stdout) == (2, "")
    _, seen, fix = three_lines(answer.stderr)
    assert seen == name
    assert words in fix


def test_what_a_file_says_does_not_reach_the_terminal(command: Run, tmp_path: Path) -> None:
    path = written(tmp_path, VALID.replace("Testbooster", r"\u001b[31mred\u0007") + '"\\u001b[2J" = 1\n')
    answer = command("muster", "site", str(path))
    assert answer.returncode == 2
    assert "\x1b" not in answer.stderr
    assert "\x07" not in answer.stderr


@pytest.mark.parametrize("arguments", [["list", "more"], ["capella", "more"]])
def test_words_that_belong_elsewhere_are_refused(command: Run, arguments: list[str]) -> None:
    answer = command("muster", "site", *arguments)
    assert answer.returncode == 2
    assert "more" in "".join(three_lines(answer.stderr))


def test_the_list_is_for_people_and_programs(command: Run) -> None:
    answer = command("muster", "site", "list", env=WIDTH)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(command("muster", "site", "list", "--json").stdout)
    assert found
    for name, site in found.items():
        assert name in answer.stdout
        assert site["title"].split()[0] in answer.stdout


def test_detect_tells_the_site(command: Run, tmp_path: Path, recording: str) -> None:
    path = str(written(tmp_path))
    answer = command("muster", "detect", "--json", "--env-file", recording, "--site", path)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["site"] == {"name": path, "title": "Testbooster", "status": "documented", "why": f"--site={path}"}
    assert found["master_addr"] == "node01i"
    assert found["env"]["NCCL_IB_TIMEOUT"] == "20"
    answer = command("muster", "detect", "--env-file", recording, env={**WIDTH, "MUSTER_SITE": path})
    assert "Testbooster" in answer.stdout
    assert "site: Testbooster" in answer.stdout.replace("\n", " ")


def test_a_launch_at_a_site_that_this_image_does_not_run_at(command: Run, tmp_path: Path, recording: str) -> None:
    path = str(written(tmp_path, 'refused = {value = "AMD GPUs need ROCm", source = "docs"}\n' + VALID))
    answer = command("train", "ddp", "--env-file", recording, "--site", path)
    assert answer.returncode == 2
    wrong, seen, fix = three_lines(answer.stderr)
    assert wrong == "this image does not run on Testbooster: AMD GPUs need ROCm"
    assert seen == f"--site={path}"
    assert "--site off" in fix


def test_a_launch_says_what_the_site_gave(command: Run, tmp_path: Path) -> None:
    """A real launch on this machine: it prints the line on the site, and its variables reach the program."""
    script = tmp_path / "show.py"
    script.write_text("import os\nprint('cache', os.environ['CACHE_OF_TESTS'])\n")
    path = written(tmp_path, VALID.replace("HF_HOME", "CACHE_OF_TESTS"))
    env = {"SCRATCH": str(tmp_path), "MUSTER_SITE": str(path)}
    answer = command(
        "muster", "run", "--no-python", "--nproc-per-node=1", sys.executable, str(script), env=env, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    assert f"cache {tmp_path}/hf" in answer.stdout
    assert "muster: site: Testbooster (MUSTER_SITE=" in answer.stderr
    assert "): CACHE_OF_TESTS" in answer.stderr


def test_the_command_line_does_not_load_the_schema() -> None:
    code = "import sys, muster.entrypoint.cli; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert not set(answer.stdout.split()) & {"msgspec", "jinja2", "elftools", "rich", "torch"}
