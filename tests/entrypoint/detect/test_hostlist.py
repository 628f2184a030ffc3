"""Host lists: those that Slurm writes, malformed ones, and lists that the tests have compressed themselves."""

import pytest
from hypothesis import given, strategies as st

from muster.entrypoint.detect.hostlist import HostListError, expand, expand_counts, whole_number


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node01", ["node01"]),
        ("node[01-03]", ["node01", "node02", "node03"]),
        (
            "gpu-a[1-2],gpu-b7,rack10n[008-009],rack11n010",
            ["gpu-a1", "gpu-a2", "gpu-b7", "rack10n008", "rack10n009", "rack11n010"],
        ),
        ("a[1-3],r[0-1]_b[0-1]", ["a1", "a2", "a3", "r0_b0", "r0_b1", "r1_b0", "r1_b1"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n[3,1-2]", ["n3", "n1", "n2"]),
        ("b1,a1", ["b1", "a1"]),
        ("n1,n2,n1", ["n1", "n2"]),
        (
            "n[1,5,9-10].cluster.example",
            ["n1.cluster.example", "n5.cluster.example", "n9.cluster.example", "n10.cluster.example"],
        ),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_lists_expand_in_their_order(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "n1,", "n[1-2", "n1-2]", "n]1[", "n[[1]]", "n[]", "n[1-]", "n[-1]", "n[a-b]", "n[2-1]", "n[1 2]", "n 1",
     "(null)", "n[1-99999999]", "n[1-1000]x[1-1000]", "n[1-" + "9" * 5000 + "]", "-n1", "n1;reboot", "$(reboot)",
     "n\n1", "n[\u0661-\u0662]", "n[" + "0-199999," * 100 + "0]", ",".join(["n[0-199999]"] * 100),
     "n," * 2_000_000 + "n"],
)  # fmt: skip
def test_malformed_host_lists_are_refused(text: str) -> None:
    with pytest.raises(HostListError):
        expand(text)


def test_ten_thousand_hosts() -> None:
    hosts = expand("nid[000001-010000]")
    assert len(hosts) == 10_000
    assert (hosts[0], hosts[-1]) == ("nid000001", "nid010000")


def fold(groups: list[tuple[str, str, int, list[int]]]) -> tuple[str, list[str]]:
    """A compressed list for groups of (prefix, suffix, digits, numbers), and the hosts it stands for."""
    items, hosts = [], []
    for prefix, suffix, digits, numbers in groups:
        ranges: list[list[int]] = []
        for number in numbers:
            if ranges and number == ranges[-1][-1] + 1:
                ranges[-1].append(number)
            else:
                ranges.append([number])
        texts = [f"{r[0]:0{digits}}" if len(r) == 1 else f"{r[0]:0{digits}}-{r[-1]:0{digits}}" for r in ranges]
        items.append(f"{prefix}[{','.join(texts)}]{suffix}")
        hosts += [f"{prefix}{number:0{digits}}{suffix}" for number in numbers]
    return ",".join(items), list(dict.fromkeys(hosts))


GROUPS = st.lists(
    st.tuples(
        st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True),
        st.from_regex(r"(-[a-z]{1,3})?", fullmatch=True),
        st.integers(1, 6),
        st.lists(st.integers(0, 12_000), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=6,
)


@given(GROUPS)
def test_expanding_what_was_folded_gives_the_same_list(groups: list[tuple[str, str, int, list[int]]]) -> None:
    text, hosts = fold(groups)
    assert list(expand(text)) == hosts


@given(st.text(alphabet="n019[],-() _x\n\x00é", max_size=40))
def test_no_text_does_anything_but_expand_or_be_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except HostListError:
        return
    assert hosts
    assert all(host.isprintable() and not set(host) & set("[], ()") for host in hosts)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1,)), ("2(x3),1", (2, 2, 2, 1)), ("4,2(x2)", (4, 2, 2)), ("1(x1)", (1,))]
)
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    "text",
    ["", "x", "2(x)", "2(x3", "2x3", "-1", "1,,2", "1(x99999999)", "9" * 5000, "1000000000000", "\u0662(x2)",
     "1(x" + "9" * 5000 + ")", "1," * 2_000_000 + "1"],
)  # fmt: skip
def test_malformed_counts_are_refused(text: str) -> None:
    with pytest.raises(HostListError):
        expand_counts(text)


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("1000000", 1_000_000)])
def test_whole_numbers(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", " 1", "1 ", "1_0", "1.0", "x", "\u0663", "1000001", "9" * 18, "9" * 5000]
)
def test_malformed_or_too_large_numbers_are_none(text: str) -> None:
    assert whole_number(text) is None
