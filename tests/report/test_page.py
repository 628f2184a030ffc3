"""The page: complete, with all tags closed and all text escaped; it loads nothing."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from muster.report import runs
from muster.report.__main__ import report
from tests.report.conftest import MORE, Make

VOID = {"meta", "br", "img"}


class Reader(HTMLParser):
    """A strict reader of a page: each end tag has to close the tag that was opened last."""

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


def drawings(page: Path) -> dict[str, str]:
    """The SVG of each chart in the page, by its name."""
    found: dict[str, str] = {}
    for tag, attributes in read(page).starts:
        if tag == "img":
            kind, _, data = str(attributes["src"]).partition(",")
            assert kind == "data:image/svg+xml;base64"
            found[str(attributes["alt"])] = base64.b64decode(data, validate=True).decode()
    for drawing in found.values():
        ElementTree.fromstring(drawing)
    return found


def texts(drawing: str) -> list[str]:
    """The texts in an SVG file."""
    found = ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in found]


def test_the_page_is_whole_and_loads_nothing(recordings: Path, measured: Path, tmp_path: Path) -> None:
    page = report([str(recordings / "scale"), str(measured), str(recordings / "gpt")], tmp_path / "out")
    reader = read(page)
    assert not {tag for tag, _ in reader.starts} & {"script", "link", "iframe", "object", "embed", "svg"}
    for _, attributes in reader.starts:
        assert not [name for name in attributes if name.startswith("on") or name in ("href", "srcset")]
        assert str(attributes.get("src", "data:")).startswith("data:")
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"</|/>|<!--|base64,[^\"]*", "", page.read_text()))
    policy = next(attributes["content"] for tag, attributes in reader.starts if "http-equiv" in attributes)
    assert "default-src 'none'" in str(policy)
    for drawing in drawings(page).values():
        assert not re.search(r"<script|href=\"(?!#)|@import", drawing)


def test_a_run_that_measured_all_has_all_charts_and_facts(measured: Path, tmp_path: Path) -> None:
    page = report([str(measured)], tmp_path / "out")
    assert list(drawings(page)) == [
        "Loss", "Accuracy", "Throughput over steps", "Memory over steps"
    ]  # fmt: skip
    words = " ".join(read(page).words)
    for said in ("41.5%", "410 T", "node02", "trace.json.gz", "p95"):
        assert said in words


def test_each_group_of_runs_is_a_line_of_the_scaling(make: Make, tmp_path: Path) -> None:
    for model in ("resnet18", "resnet50"):
        for size in (1, 2, 4):
            changes = {"model": model, "world_size": size, "images_per_second": 90 * size, "global_batch": 32 * size}
            make(f"all/{model}-{size}", changes)
    found = drawings(report([str(tmp_path / "all")], None))
    for name in ("throughput", "efficiency"):
        words = texts(found[f"Weak scaling: {name}"])
        assert {f"{model} on digits, ddp, CPU, batch of 32 a rank" for model in ("resnet18", "resnet50")} < {*words}
        assert {"1", "2", "4", "ideal"} < {*words}
    assert "100%" in texts(found["Weak scaling: efficiency"])


def test_steps_are_whole_numbers_and_a_single_point_is_no_chart(make: Make, tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "steps", "step": step, "train_loss": 1 / step}) for step in (1, 2, 3)]
    lines.append(json.dumps({"kind": "epoch", "step": 3, "valid_accuracy": 0.5}))
    found = drawings(report([str(make("short", {"step": 3}, lines))], tmp_path / "out"))
    assert list(found) == ["Loss"]
    assert texts(found["Loss"])[:4] == ["1", "2", "3", "step"]


def test_all_that_a_run_says_is_escaped(make: Make, tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"'&$\\frac{1}$\x1b[31m\n"
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
    named = ["<script>alert(1)<", '"><b>&x', "_$\\alpha$_{1}"]
    folders = [make(name, changes | {"world_size": 1 + n, "global_batch": 16}) for n, name in enumerate(named)]
    page = report([str(folder) for folder in folders], tmp_path / "out")
    text, reader = page.read_text(), read(page)
    assert not {tag for tag, _ in reader.starts} & {"script", "b"}
    assert "<script" not in text
    assert "\x1b" not in text
    words = " ".join(reader.words)
    assert all(name in words for name in named)
    # In the charts too, where a text between dollars is no formula.
    for drawing in drawings(page).values():
        assert "\x1b" not in drawing
        assert "<script" not in drawing
    written = [text.lstrip("\u200b") for text in texts(drawings(page)["Loss"])]
    assert set(named) < set(written)


def test_the_same_runs_give_the_same_bytes(recordings: Path, measured: Path, tmp_path: Path) -> None:
    first, second = (
        report([str(recordings / "scale"), str(measured)], tmp_path / name).read_bytes() for name in ("one", "two")
    )
    assert first == second


def test_a_run_of_which_little_is_known_has_a_page_too(make: Make, tmp_path: Path) -> None:
    line = json.dumps({"kind": "steps", "step": 50, "train_loss": 1.0})
    page = report([str(make("young", lines=[line], with_summary=False))], tmp_path / "out")
    assert "not finished" in " ".join(read(page).words)
    assert drawings(page) == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((value, value) for value in (0.0, -1.0, 1e300, 1.7e308)),
        *((-1e300, 1e300), (0.0, 5e-324), (5e-324, 1e300), (2.3025851249694824, 2.302585124969483)),
    ],
)
def test_charts_bear_odd_numbers(make: Make, tmp_path: Path, first: float, second: float) -> None:
    names = ("train_loss", "train_accuracy", "images_per_second", "memory_gib")
    lines = [
        json.dumps({"kind": "steps", "step": step, **dict.fromkeys(names, value)})
        for step, value in ((10, first), (20 + abs(first), second), (30, first))
    ]
    odd = {"shares": {"compute": first, "data": second}}
    one = make("one", {**odd, "images_per_second": abs(first), "world_size": 1}, lines)
    two = make("two", {**odd, "images_per_second": abs(second), "world_size": 2}, lines)
    charts = drawings(report([str(one), str(two)], tmp_path / "out"))
    assert charts or first > runs.LARGEST
    for drawing in charts.values():
        assert not re.search(r'="[^"]*\b(nan|inf)\b', drawing)
