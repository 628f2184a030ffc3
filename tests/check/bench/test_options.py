"""The options of bench: sizes, collectives, the site, and values that are refused."""

import subprocess
import sys

import pytest

from muster.arguments import to_argv
from muster.check.__main__ import parse
from muster.check.bench import baseline, collectives
from muster.check.bench.collectives import shown as size_shown
from muster.check.bench.sweep import chosen_sizes, parse_size
from muster.check.options import BenchOptions
from muster.errors import MusterError
from muster.variables import LaunchVariable
from tests.train.conftest import environment

GIBI = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("1K", 1024), ("1k", 1024), ("4M", 4 << 20), ("1G", GIBI), ("2MiB", 2 << 20), ("3MB", 3 << 20)],
)
def test_sizes_are_read(text, size):
    assert parse_size(text, "--max-size") == size


@pytest.mark.parametrize("text", ["", "K", "1T", "-1K", "1.5M", "3", "0", "4 M x", "١K", "9" * 40, "9" * 15 + "G"])
def test_what_is_no_size_is_told(text):
    with pytest.raises(MusterError) as raised:
        parse_size(text, "--max-size")
    assert (raised.value.code, raised.value.seen) == (2, f"--max-size={text}")


@pytest.mark.parametrize("size", [4, 1000, 1024, 1536, 4096, 1 << 20, 3 << 20, GIBI, 1_048_572, 27 << 59])
def test_a_size_is_shown_shorter_than_it_is(size):
    shown = size_shown(size)
    assert len(shown) <= 6
    if size % 1024 == 0:
        assert "." in shown or parse_size(shown, "") == size


def test_the_sweep_goes_by_the_factor_and_to_the_backends_largest():
    assert chosen_sizes(BenchOptions(max_size="1M"), "gloo") == tuple(1024 * 4**power for power in range(6))
    assert chosen_sizes(BenchOptions(min_size="3K", max_size="10K", factor=2), "gloo") == (3072, 6144)
    assert chosen_sizes(BenchOptions(max_size="512"), "gloo") == (512,)  # less than the default smallest size
    assert chosen_sizes(BenchOptions(min_size="128M"), "gloo") == (128 << 20,)  # more than the default largest size
    assert chosen_sizes(BenchOptions(), "gloo")[-1] == 64 << 20
    assert chosen_sizes(BenchOptions(), "nccl")[-1] == GIBI
    with pytest.raises(MusterError, match="larger than the largest") as raised:
        chosen_sizes(BenchOptions(min_size="4M", max_size="1M"), "gloo")
    assert raised.value.seen == "--min-size=4M --max-size=1M"


def test_collectives_are_chosen_by_name_each_once():
    assert collectives.chosen("all") == collectives.NAMES
    assert collectives.chosen(" barrier,All-Reduce , all_reduce") == ("all_reduce", "barrier")


@pytest.mark.parametrize("text", ["all_reduce,barier", "alltoall", "", "xyz"])
def test_a_misspelt_collective_is_told_with_those_there_are(text):
    with pytest.raises(MusterError) as raised:
        collectives.chosen(text)
    assert raised.value.code == 2
    assert "all_reduce, all_gather" in raised.value.fix


def test_options_come_back_from_their_arguments():
    options = BenchOptions(collectives="barrier", max_size="4M", save_baseline="a b.json", allow_tcp=True, json=True)
    assert parse("bench", to_argv(options)) == options


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"SLURM_CLUSTER_NAME": "alps"}, "alps"),
        ({"MUSTER_SITE": "auto", "SLURM_CLUSTER_NAME": "alps"}, "alps"),
        ({"MUSTER_SITE": "mine", "SLURM_CLUSTER_NAME": "alps"}, "mine"),
        ({"MUSTER_SITE_FOUND": "jsc", "MUSTER_SITE": "mine"}, "jsc"),
    ],
)
def test_the_site_is_the_launchs_word_the_users_or_the_clusters_name(environ, name):
    assert baseline.site(environ) == name


def test_the_launch_tells_bench_its_site():
    code = "from muster.entrypoint.cli import muster; muster()"
    command = [sys.executable, "-P", "-c", code, "bench", "--site=juwels-booster", "--dry-run"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=240)
    assert f"export {LaunchVariable.SITE_FOUND}=juwels-booster\n" in done.stdout


def test_an_unknown_option_is_for_the_user_to_mend():
    with pytest.raises(MusterError) as raised:
        parse("bench", ["--max-sice=4M"])
    assert (raised.value.code, raised.value.seen) == (2, "bench --max-sice=4M")


@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_a_wait_that_is_too_long_for_the_system_is_for_the_user_to_mend(command):
    with pytest.raises(MusterError, match="--timeout-s") as raised:
        parse(command, ["--timeout-s=99999999999"])
    assert raised.value.code == 2
