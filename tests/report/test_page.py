"""The page: whole, closed, escaped, and nothing loaded from elsewhere."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from report.__main__ import report
from report.style import CSS
from tests.report.conftest import MORE, Make

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Reads a page as a browser does that forgives nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.starts: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.starts.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.starts.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    return reader


def test_the_page_is_whole_and_loads_nothing(recordings: Path, measured: Path, tmp_path: Path) -> None:
    page = report([str(recordings / "scale"), str(measured), str(recordings / "gpt")], tmp_path / "out")
    text = page.read_text()
    reader = read(page)
    assert not {tag for tag, _ in reader.starts} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "image",
        "use",
    }
    names = {name for _, attributes in reader.starts for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "xlink:href", "srcset")}
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"</|/>|<!--", "", text))
    policy = next(attributes["content"] for tag, attributes in reader.starts if "http-equiv" in attributes)
    assert "default-src 'none'" in str(policy)


def test_each_chart_has_a_name_a_description_and_its_numbers(measured: Path, tmp_path: Path) -> None:
    page = report([str(measured)], tmp_path / "out")
    reader = read(page)
    drawings = [attributes for tag, attributes in reader.starts if tag == "svg" and attributes.get("role") == "img"]
    assert len(drawings) == 6
    for attributes in drawings:
        assert set(str(attributes["aria-labelledby"]).split()) <= set(reader.ids)
    figures = page.read_text().split("<figure>")[1:]
    assert len(figures) == 6
    assert all("<table" in figure.partition("</figure>")[0] for figure in figures)
    words = " ".join(reader.words)
    for said in ("41.5 %", "410.0 T", "node02", "1 (slowest)", "trace.json.gz", "p95"):
        assert said in words


def test_the_table_beside_a_chart_has_the_validations(make: Make, tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "steps", "step": step, "train_loss": 2.0}) for step in range(10, 2000, 10)]
    lines.append(json.dumps({"kind": "epoch", "epoch": 1, "step": 777, "train_loss": 2.0, "valid_loss": 1.2345}))
    text = report([str(make("run", {"step": 2000}, lines))], tmp_path / "out").read_text()
    (loss,) = re.findall(r"<figure>.*?<h3>Loss</h3>.*?</figure>", text, re.DOTALL)
    assert '<th scope="row">777</th><td>-</td><td>1.2345</td>' in loss
    assert loss.count('<th scope="row">') <= 14


def test_lines_differ_by_more_than_their_colour(recordings: Path, tmp_path: Path) -> None:
    text = report([str(recordings / "scale")], tmp_path / "out").read_text()
    legend = re.findall(r'<ul class="legend">(.*?)</ul>', text)
    swatches = [re.findall(r"<svg class=\"swatch c\d+\".*?</svg>", one) for one in legend]
    of_runs = [[re.sub(r"\bc\d\b", "", swatch) for swatch in one] for one in swatches if len(one) > 2]
    assert of_runs
    assert all(len(set(one)) == len(one) for one in of_runs)


def test_both_schemes_and_a_phone_have_their_style() -> None:
    assert "prefers-color-scheme: dark" in CSS
    assert "@media print" in CSS
    assert re.search(r"@media \(max-width: \d+px\)", CSS)
    # Each colour that is used is set, in the light and in the dark.
    used = set(re.findall(r"var\((--\w+)\)", CSS))
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")[:2]
    assert used == set(re.findall(r"(--\w+):", light))
    assert used == set(re.findall(r"(--\w+):", dark.partition("box-sizing")[0]))


def test_all_that_a_run_says_is_escaped(make: Make, tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"'&\x1b[31m\n"
    ranks = [rank | {"host": evil} for rank in MORE["ranks"]]
    changes = {
        **MORE,
        **{name: evil for name in ("model", "data", "strategy", "device", "command", "resumed_from", "profile")},
        "hosts": [evil] * 2,
        "ranks": ranks,
        "slowest_rank": {"rank": 1, "host": evil, "ratio": 1.5},
        "versions": {evil: evil, "gpu": evil},
        "options": {evil: evil},
    }
    folders = [make("<script>alert(1)<", changes), make('"><b>&x', changes | {"world_size": 1, "global_batch": 16})]
    page = report([str(folder) for folder in folders], tmp_path / "out")
    text = page.read_text()
    reader = read(page)
    assert not {tag for tag, _ in reader.starts} & {"script", "b"}
    assert "<script" not in text
    assert "\x1b" not in text
    assert all(
        "alert" not in str(value) or name == "aria-label" for _, found in reader.starts for name, value in found.items()
    )
    assert "<script>alert(1)<" in " ".join(reader.words)


def test_values_far_apart_have_a_page(make: Make, tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "steps", "step": 10 + loss / 1e299, "train_loss": loss}) for loss in (-1e300, 1e300)]
    read(report([str(make("far", lines=lines))], tmp_path / "out"))


def test_the_same_runs_give_the_same_bytes(recordings: Path, measured: Path, tmp_path: Path) -> None:
    made = [report([str(recordings / "scale"), str(measured)], tmp_path / name).parent for name in ("one", "two")]
    first, second = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in made]
    assert len(first) == 9
    assert first == second


def test_a_run_of_which_little_is_known_has_a_page_too(make: Make, tmp_path: Path) -> None:
    line = json.dumps({"kind": "steps", "step": 50, "train_loss": 1.0})
    page = report([str(make("young", lines=[line], with_summary=False))], tmp_path / "out")
    assert "not finished" in " ".join(read(page).words)
    assert "nan" not in page.read_text().lower().replace("finance", "")


@pytest.mark.parametrize(
    ("first", "second"), [(2.3025851249694824, 2.302585124969483), (0.0, 5e-324), (-1e300, -1e300)]
)
def test_values_that_are_almost_one_are_a_flat_line(make: Make, tmp_path: Path, first: float, second: float) -> None:
    lines = [
        json.dumps({"kind": "steps", "step": step, "train_loss": loss, "memory_gib": loss})
        for step, loss in ((10, first), (20, second), (30, first))
    ]
    page = report([str(make("flat", {"step": 30}, lines))], tmp_path / "out")
    (loss,) = re.findall(r"<figure>.*?<h3>Loss</h3>.*?</figure>", page.read_text(), re.DOTALL)
    (path,) = re.findall(r'<path class="l" d="(M[^"]*L[^"]*)"', loss)
    assert len({point.partition(",")[2] for point in re.findall(r"[ML]([^ML]+)", path)}) == 1
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page.read_text())


@pytest.mark.parametrize("value", [0.0, -1.0, 1e300, 1.7e308])
def test_charts_bear_odd_numbers(make: Make, tmp_path: Path, value: float) -> None:
    lines = [
        json.dumps(
            {"kind": "steps", "step": step, "train_loss": value, "images_per_second": value, "memory_gib": value}
        )
        for step in (10, 20)
    ]
    page = report([str(make("odd", lines=lines))], tmp_path / "out")
    read(page)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page.read_text())
