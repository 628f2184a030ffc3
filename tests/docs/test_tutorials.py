"""Every command of the tutorials, run as a reader would, and the output that the pages show."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs import pages, running
from tests.docs.running import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [path for path in TUTORIALS if path.name != "README.md"]
SHORT = ("first-run", "hello")


@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem in SHORT else pytest.mark.full) for path in PAGES],
    ids=[path.stem for path in PAGES],
)
def test_its_commands_do_what_it_says(path: Path, tmp_path: Path) -> None:
    page = pages.read(path)
    assert page.commands(), "no command of this page is run"
    wrong = running.check(page, tmp_path)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_it_launches_elsewhere_can_be_planned(path: Path, tmp_path: Path) -> None:
    wrong = running.check(pages.read(path), tmp_path, "dry")
    assert not wrong, "\n\n".join(wrong)


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "tutorials" / "README.md").read_text()
    assert [path.name for path in PAGES if f"({path.name})" not in index] == []


def test_messages_among_the_symptoms_are_words_of_the_program() -> None:
    """The first columns of tables quote messages in backticks; most of their rows do."""
    page = (ROOT / "docs" / "tutorials" / "symptoms.md").read_text()
    quoted = [text for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 20
    spoken = "\n".join(
        said(path) for folder in ("entrypoint", "muster", "train") for path in (ROOT / folder).rglob("*.py")
    )
    assert [text for text in quoted if text not in spoken and text not in COMMANDS] == []


COMMANDS = ("train dp",)


def said(path: Path) -> str:
    """All text in a module, with `{}` where a value is filled in."""
    lines: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            lines.append("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values))
    return "\n".join(lines)
