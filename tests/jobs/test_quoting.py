"""Quoting: a shell reads every value unchanged."""

import subprocess

import pytest
from hypothesis import given, settings, strategies as st

from muster.entrypoint import show
from muster.entrypoint.jobs import quoting
from muster.errors import MusterError

HOSTILE = [
    "a b",
    "it's",
    '"',
    "$(id)",
    "`id`",
    "a\nb",
    "\\",
    "\\$HOME",
    "*",
    "",
    "-n",
    "!x",
    "$",
    "${",
    "${X:-y}",
    "a\\",
]


def read_by_a_shell(text: str, **variables: str) -> str:
    argv = ["bash", "-c", f"printf '%s.' {text}"]
    return subprocess.run(argv, env=variables, capture_output=True, check=True, timeout=10).stdout.decode()


@pytest.mark.parametrize("value", HOSTILE)
def test_words_and_folders_come_out_as_they_went_in(value: str) -> None:
    assert read_by_a_shell(show.word(value)) == f"{value}."
    assert read_by_a_shell(quoting.expanded(value), HOME="/home") == f"{value}.".replace("$HOME", "/home")


@pytest.mark.parametrize("value", [*filter(str.isprintable, filter(None, HOSTILE)), "a<(b", "a>(touch x)", "a}'<(b"])
def test_a_default_comes_out_as_it_went_in(value: str) -> None:
    assert read_by_a_shell(f'"${{X:-{quoting.fallback(value)}}}"') == f"{value}."


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(min_codepoint=1, codec="ascii"), max_size=30).filter(
        lambda text: not quoting.variables_in(text)
    )
)
def test_any_folder(value: str) -> None:
    assert read_by_a_shell(quoting.expanded(value)) == f"{value}."


def test_variables_of_folders_are_expanded_and_nothing_in_them() -> None:
    given = '$SCRATCH/${USER}s "runs"/$(id)'
    assert quoting.variables_in(given) == ["SCRATCH", "USER"]
    found = read_by_a_shell(quoting.expanded(given), SCRATCH="/a b/$(id)", USER="me")
    assert found == '/a b/$(id)/mes "runs"/$(id).'


@settings(max_examples=60, deadline=None)
@given(st.text("ab \n\r\\'\"$#!n", max_size=12))
def test_any_word_stays_on_its_line(value: str) -> None:
    word = show.word(value)
    assert not {"\n", "\r"} & set(word)
    assert read_by_a_shell(word) == f"{value}."


@pytest.mark.parametrize("value", ["", "a\nb", "a\rb", "\x1b[31m", "a\u2028b"])
def test_a_directive_stays_on_its_line(value: str) -> None:
    with pytest.raises(MusterError, match="one line of printable characters"):
        quoting.directive(value)


@pytest.mark.parametrize("value", ["a b", "$(id)", "a;b", "", "-x", "a\nb", "a#b", "ü"])
def test_what_a_user_gives_for_a_directive_is_one_plain_word(value: str) -> None:
    with pytest.raises(MusterError, match="--account is one word"):
        quoting.check_plain(value, "--account")


def test_a_comment_stays_one() -> None:
    assert quoting.comment("a\nrm -rf ~\r\x1b[2J") == "a rm -rf ~ \\x1b[2J"
    assert all(len(line) <= 116 for line in quoting.wrapped("word " * 100))
