"""The problems of a profile: each is reported with its key, and all that break a rule at once."""

from pathlib import Path

import pytest

from muster.entrypoint.sites import profiles
from muster.entrypoint.sites.profiles import BadProfile
from muster.errors import MusterError
from tests.sites.profile import HEAD, TABLES, VALID, problems, written


def test_the_profile_of_these_tests_is_valid(tmp_path: Path) -> None:
    assert problems(tmp_path, VALID) == ()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        # Messages of msgspec on keys and types.
        ("address_suffix =", "adress_suffix =", "unknown field `adress_suffix` - at `$.network`"),
        ("[network]", "[netwrok]", "unknown field `netwrok`"),
        ("when = {nodes", "when = {node", "unknown field `node`"),
        ('title = "Testbooster"\n', "", "missing required field `title`"),
        ('"Testbooster"', "7", "Expected `str`, got `int` - at `$.title`"),
        ("{value = 4,", '{value = "4",', "Expected `int`, got `str` - at `$.nodes.gpus.value`"),
        ("{value = 4,", "{value = true,", "Expected `int`, got `bool` - at `$.nodes.gpus.value`"),
        ("{value = 4,", "{value = -1,", "`$.nodes.gpus.value`"),
        ('{value = 4, source = "docs"}', "4", "`$.nodes.gpus`"),
        ('["--cpu-bind=none"]', '"--x"', "Expected a list, got `str` - at `$.launch.flags.value`"),
        ("2026-01-31", "3", "Expected `date`"),
        ("2026-01-31", '"31.1.2026"', "Expected a day, such as 2026-01-31 - at `$.sources[...].read`"),
        ('"slurm"', '"slrum"', 'scheduler: "slrum" is none of'),
        ('"documented"', '"rumoured"', "Invalid enum value 'rumoured'"),
        # Rules on values of the right type.
        ('gpus = {value = 4, source = "docs"}', 'gpus = {value = 4, source = "dosc"}',
         'nodes.gpus.source: there is no [sources] key "dosc"; there are: docs'),
        ('"https://docs.example.org/gpu", read', '"ftp://docs.example.org", read', "`$.sources[...].url`"),
        ('"https://docs.example.org/gpu", read', '"https://a b.org/", read', "`$.sources[...].url`"),
        ('documentation = "https', 'documentation = "htps', "`$.documentation`"),
        ('"infiniband"', '"infinband"', 'extends: there is no fabric "infinband"; there are: infiniband'),
        ('nodes = ">1"', 'nodes = "many"', 'Expected numbers, such as ">1" or ">=2,<64" - at'),
        ('nodes = ">1"', 'gpu = " "', "`$.variables[...].when.gpu`"),
        ('["--cpu-bind=none"]', r'["--x\nrm -rf /"]', "`$.launch.flags.value[0]`"),
        ('"Testbooster"', r'"\u001b[31mred"', "`$.title`"),
        ('"Testbooster"', '" "', "title: is empty"),
        ('value = "booster"', 'value = "booster; rm -rf /"', "`$.launch.partition.value`"),
        ('value = "booster"', 'value = "$(reboot)"', "Expected one word of letters, digits and - _ . , : @ / + - at"),
        ('{value = "booster", source = "docs"}', '"booster"', "Expected a table, {key = ...}, got `str` - at"),
        ('value = "i"', 'value = "i;x"', "`$.network.address_suffix.value`"),
        ('"$SCRATCH/hf"', '"$(reboot)/hf"', "caches.HF_HOME: "),
        ('"$SCRATCH/hf"', '"`reboot`/hf"', "caches.HF_HOME: "),
        ('"$SCRATCH/hf"', "'$SCRATCH/\"; reboot; \"'", "caches.HF_HOME: "),
        ('"$SCRATCH/hf"', '"~/hf"', "caches.HF_HOME: "),
        ("HF_HOME =", '"HF HOME" =', "`key` in `$.caches`"),
        ("NCCL_IB_TIMEOUT =", '"1;reboot" =', "`key` in `$.variables`"),
        ('["tb[0-9]*"]', '["*"]', 'recognise.hosts: "*" matches everything'),
        ('["tb[0-9]*"]', '["tb1", "?*"]', 'recognise.hosts: "?*" matches everything'),
        ('["tb[0-9]*"]', '["[a-z]*"]', 'recognise.hosts: "[a-z]*" matches everything'),
        ('["testbooster"], source = "docs"}', '["testbooster"], source = "docs", when = {nodes = ">1"}}',
         "recognise.cluster.when: keys of recognise take no condition"),
    ],
)  # fmt: skip
def test_each_thing_that_can_be_wrong(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in VALID
    found = problems(tmp_path, VALID.replace(old, new, 1))
    assert [text for text in found if problem in text], found


@pytest.mark.parametrize("directive", ["--nodes=4", "-l select=2:ncpus=4", "-nnodes 4"])
def test_the_number_of_nodes_is_no_directive(tmp_path: Path, directive: str) -> None:
    """It would override the user's --nodes, or contradict it."""
    line = f'directives = {{value = ["{directive}"], source = "docs"}}\n'
    (problem,) = problems(tmp_path, VALID.replace("[launch]\n", f"[launch]\n{line}"))
    assert problem.startswith(f'launch.directives: "{directive}" asks for nodes')


@pytest.mark.parametrize("value", ['{A = "*"}', '{PATH = "?*"}'])
def test_a_variable_of_any_value_tells_nothing(tmp_path: Path, value: str) -> None:
    line = f'recognise.variables = {{value = {value}, source = "docs"}}\n'
    assert any("matches everything" in problem for problem in problems(tmp_path, HEAD + line + TABLES))


def test_a_directive_has_its_word_left_out(tmp_path: Path) -> None:
    text = VALID.replace("[launch]\n", '[launch]\ndirectives = {value = ["#SBATCH --exclusive"], source = "docs"}\n')
    (problem,) = problems(tmp_path, text)
    assert problem == 'launch.directives: "#SBATCH --exclusive" leave its #SBATCH, #PBS, #BSUB or #$ out'


@pytest.mark.parametrize(
    "table",
    ['[container]\nbinds = {value = ["/a,b"]', '[storage]\nscratch = {value = "/a,b"'],
    ids=["binds", "scratch"],
)
def test_a_comma_would_end_a_bind(tmp_path: Path, table: str) -> None:
    (problem,) = problems(tmp_path, VALID + table + ', source = "docs"}\n')
    assert problem.endswith("would take the rest for another folder")


def test_all_that_breaks_a_rule_is_told_at_once(tmp_path: Path) -> None:
    text = VALID.replace("Testbooster", " ").replace('{value = 4, source = "docs"', '{value = 4, source = "dosc"')
    with pytest.raises(BadProfile) as refused:
        profiles.load_site(written(tmp_path, text.replace("$SCRATCH/hf", "~/hf")))
    found = refused.value.problems
    assert [problem.partition(":")[0] for problem in found] == ["title", "nodes.gpus.source", "caches.HF_HOME"]
    assert refused.value.code == 2
    assert all(problem in str(refused.value) for problem in found)
    assert str(tmp_path) in refused.value.seen


def test_what_a_site_is_recognised_by_stands_before_the_tables(tmp_path: Path) -> None:
    line = next(line for line in VALID.splitlines(keepends=True) if line.startswith("recognise.hosts"))
    moved = VALID.replace(line, "") + '\n[recognise.hosts]\nvalue = ["tb*"]\nsource = "docs"\n'
    (problem,) = problems(tmp_path, moved)
    assert problem.startswith("recognise: belongs before the first [table]")


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"title = \n", "line 1"),
        (b'title = "a"\n\n[launch\n', "line 3"),
        (b"\xff\xfe", "can't decode"),
        (b"title = " + 5000 * b"9", "digits"),
        (b"a = " + 3000 * b"[", "recursion"),
        (b"a" + 3000 * b".a" + b" = 1", "site.toml"),
    ],
)
def test_what_is_no_toml_is_refused_with_its_line(tmp_path: Path, content: bytes, seen: str) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(content)
    with pytest.raises(MusterError) as refused:
        profiles.load_site(path)
    assert seen in refused.value.seen
    assert str(path) in refused.value.seen


@pytest.mark.parametrize(
    "name", ["../../nowhere/passwd", "/nowhere/a.toml", "a.toml", "", "$(reboot)", "a\nb", "juwles-booster"]
)
def test_a_profile_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(MusterError, match="there is no") as refused:
        profiles.load_site(name)
    assert "\n" not in str(refused.value).partition(" seen: ")[2].partition("\n  fix: ")[0]


@pytest.mark.parametrize("name", [300 * "a", 300 * "a" + ".toml", Path(300 * "a")], ids=["name", "file", "path"])
def test_a_name_that_no_file_can_have(name: str | Path) -> None:
    with pytest.raises(MusterError) as refused:
        profiles.load_site(name)
    assert (refused.value.code, 300 * "a" in refused.value.seen) == (2, True)
    with pytest.raises(MusterError):
        profiles.load_fabric(str(name))


def test_a_folder_that_this_user_may_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = written(tmp_path)
    # Simulated, as root may enter every folder.
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(MusterError, match="the profile can't be read") as refused:
        profiles.load_site(path)
    assert "Permission denied" in refused.value.seen
