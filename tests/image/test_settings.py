"""What of this machine's settings a build is shown, and which engine does it: no engine is needed to know."""

import stat
from pathlib import Path

import pytest

from image import base, build, engines, errors, settings, sif
from image.engines import Engine
from train.errors import MusterError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with pip's settings in it, and a folder of wheels and an index of files."""
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / "index/simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    (tmp_path / ".config/pip/pip.conf").write_text(
        f"[global]\ncert = /own/ca.pem\nindex-url = https://mirror.example/simple\n"
        f"[install]\nextra-index-url =\n    file://{tmp_path}/index/simple\n    https://other.example/simple\n"
    )
    return tmp_path


def test_pips_settings_as_pip_finds_them(home: Path) -> None:
    found = settings.pip_options({"HOME": str(home), "PIP_FIND_LINKS": str(home / "wheels"), "PIP_CERT": "/x"})
    assert found["index-url"] == "https://mirror.example/simple"
    assert found["extra-index-url"] == f"file://{home}/index/simple https://other.example/simple"
    assert found["find-links"] == str(home / "wheels")
    assert "cert" not in found, "the bundle itself is shown, its path would be another"


def test_a_variable_wins_over_the_files(home: Path) -> None:
    found = settings.pip_options({"HOME": str(home), "PIP_INDEX_URL": "https://won.example/simple"})
    assert found["index-url"] == "https://won.example/simple"


def test_folders_are_shown_under_names_that_tell_nothing(home: Path) -> None:
    folders: dict[Path, str] = {}
    options = settings.pip_options({"HOME": str(home), "PIP_FIND_LINKS": str(home / "wheels")})
    seen = settings.seen_by_build(options, folders)
    # The pages of an index point to files beside them.
    assert folders == {home / "index": "/run/packages/0", home / "wheels": "/run/packages/1"}
    assert seen["extra-index-url"] == "file:///run/packages/0/simple https://other.example/simple"
    assert seen["find-links"] == "file:///run/packages/1"
    assert str(home) not in " ".join(seen.values())


def test_docker_does_without_folders(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shown").mkdir()
    env = {"HOME": str(home), "PIP_FIND_LINKS": str(home / "wheels")}
    shown = settings.collect(tmp_path / "shown", env, can_bind=Engine("docker").can_bind)
    assert shown.folders == {}
    conf = shown.secrets["pip.conf"].read_text()
    assert "extra-index-url = https://other.example/simple\n" in conf
    assert "/run/packages" not in conf
    assert "docker can't show folders" in capsys.readouterr().out


@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_NO_INDEX"])
def test_docker_refuses_where_only_folders_are_left(home: Path, tmp_path: Path, variable: str) -> None:
    (tmp_path / "shown").mkdir()
    value = f"file://{home}/index/simple" if variable == "PIP_INDEX_URL" else "1"
    env = {"HOME": str(home), "PIP_FIND_LINKS": str(home / "wheels"), variable: value}
    with pytest.raises(MusterError, match="ENGINE=podman"):
        settings.collect(tmp_path / "shown", env, can_bind=False)


def test_secrets_are_files_of_a_private_folder(home: Path, tmp_path: Path) -> None:
    sources = tmp_path / "mirror.list"
    sources.write_text("deb http://mirror.example/debian bookworm main\n")
    folder = tmp_path / "shown"
    folder.mkdir(mode=0o700)
    shown = settings.collect(folder, {"HOME": str(home), "SSL_CERT_FILE": str(sources)}, str(sources))
    assert set(shown.secrets) == {"pip.conf", "apt.conf", "apt.sources", "ca.pem"}
    assert all(path.parent == folder for path in shown.secrets.values())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert 'Dir::Etc::SourceList "/run/secrets/apt.sources";' in shown.secrets["apt.conf"].read_text()


def test_apts_proxies_are_taken_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for apt-config, which Debian has and other systems do not."""
    stand_in = tmp_path / "apt-config"
    lines = [
        'Acquire::http::Proxy "http://proxy:3142";',
        'Acquire::Check-Valid-Until "false";',
        'APT::Update::Post-Invoke:: "rm -rf /";',
        'Acquire::Languages "none";',
    ]
    stand_in.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert settings.apt_options() == lines[:2]
    monkeypatch.setenv("PATH", "/nonexistent")
    assert settings.apt_options() == []


def test_an_engine_that_is_not_there_or_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MusterError, match="nor buildah is not on PATH"):
        engines.find()
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    with pytest.raises(MusterError, match="`docker info` fails"):
        engines.find()
    (tmp_path / "buildah").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "buildah").chmod(0o755)
    assert engines.find().name == "buildah"
    with pytest.raises(MusterError, match="no such engine"):
        engines.find("lxc")


def test_the_words_that_an_engine_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The engine is a stand-in that prints its words: docker's daemon and registries are not in reach of the tests."""
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$DOCKER_BUILDKIT" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    shown = settings.Settings({"pip.conf": tmp_path / "a folder/pip.conf"}, {})
    build.make(Engine("docker"), build.VARIANTS["cuda12"], "base:1", ["muster:cuda12"], shown, "1700000000")
    words = capfd.readouterr().out.splitlines()
    assert words[:2] == ["1", "build"]
    assert f"id=pip.conf,src={tmp_path}/a folder/pip.conf" in words
    assert "LOCK=requirements-cuda12.lock" in words
    assert "BASE_IMAGE=base:1" in words
    assert "SOURCE_DATE_EPOCH=1700000000" in words
    assert words[-1] == str(build.ROOT)


def test_tags_and_versions() -> None:
    assert build.names(build.VARIANTS["cuda13"]) == ["muster:latest", f"muster:{build.version()}"]
    assert build.names(build.VARIANTS["cuda12"]) == ["muster:cuda12", f"muster:{build.version()}-cuda12"]


def test_a_base_needs_mmdebstrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MusterError, match="no mmdebstrap on PATH"):
        base.make(Engine("podman"), "x", settings.Settings({}, {}), "0")


@pytest.mark.parametrize("words", [["--apt-sources=/none"], ["--variant=rocm"], ["--engine=lxc"], ["--nonsense"]])
def test_bad_options_are_three_lines_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        errors.command(build.main, words)
    assert ended.value.code == 2
    assert [line[:7] for line in capsys.readouterr().err.splitlines()] == ["error: ", " seen: ", "  fix: "]


def test_a_program_that_is_not_there_or_does_not_end() -> None:
    with pytest.raises(MusterError, match="can't be started"):
        errors.run(["/none/such"])
    with pytest.raises(MusterError, match="waited 0 s for sleep 60"):
        errors.run(["sleep", "60"], timeout=0.2)
    with pytest.raises(MusterError, match="-> out of luck") as failed:
        errors.output(["sh", "-c", "echo out of luck >&2; exit 3"])
    assert failed.value.wrong == "sh failed with exit code 3"


def test_a_registry_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine is a stand-in: no registry is in reach of the tests."""
    (tmp_path / "podman").write_text("#!/bin/sh\necho first >&2; echo no such host >&2; exit 125\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Engine("podman").pull("docker.io/none") == "no such host"


def test_a_sif_in_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        errors.command(sif.main, ["--output=/none/such/x.sif"])
    assert ended.value.code == 2
    assert "/none/such" in capsys.readouterr().err
