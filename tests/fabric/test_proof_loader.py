"""Where the loader looks for the libraries that one needs: by DT_RPATH of all above it, and by $ORIGIN."""

import pytest

from tests.fabric.test_proof_refusals import refusal
from tests.fabric.test_stage_plan import names, planned
from tests.fabric.trees import Tree, fabric

PLUGIN = "libnccl-net.so"
FOLDER = "/opt/x/lib"
PROFILE = fabric(plugins=(f"{FOLDER}/{PLUGIN}",))


def chain(host: Tree, tags: str, *of_middle: str) -> None:
    """A plugin that names a folder to search, a library that it needs, and one that this needs: all in that folder."""
    options = [f"--{tags}-new-dtags", "-rpath", FOLDER]
    host.plugin(f"{FOLDER}/{PLUGIN}", needs={"liba.so.1": []}, options=options)
    host.library(f"{FOLDER}/liba.so.1", "liba.so.1", needs={"libb.so.1": []}, options=of_middle)
    host.library(f"{FOLDER}/libb.so.1", "libb.so.1")


@pytest.mark.parametrize("of_middle", [(), ("--disable-new-dtags", "-rpath", "/opt/none")])
def test_an_rpath_holds_for_what_is_needed_below(host: Tree, image: Tree, of_middle: tuple[str, ...]) -> None:
    chain(host, "disable", *of_middle)
    assert list(names(planned(host, image, PROFILE))) == [PLUGIN, "liba.so.1", "libb.so.1"]


@pytest.mark.parametrize(
    ("tags", "of_middle"), [("enable", ()), ("disable", ("--enable-new-dtags", "-rpath", "/opt/none"))]
)
def test_a_runpath_does_not_hold_below_and_hides_rpaths_above(
    host: Tree, image: Tree, tags: str, of_middle: tuple[str, ...]
) -> None:
    chain(host, tags, *of_middle)
    assert refusal(host, image, PROFILE).needs == "libb.so.1"


def test_origin_is_the_folder_by_which_a_library_is_opened(host: Tree, image: Tree) -> None:
    """As in Spack's views: a folder of links into a store, where each package has its own folder."""
    host.plugin(f"/store/plugin/{PLUGIN}", needs={"liba.so.1": []}, options=["-rpath", "$ORIGIN"])
    host.library("/store/a/liba.so.1", "liba.so.1", needs={"libb.so.1": []}, options=["-rpath", "$ORIGIN"])
    host.library("/store/a/libb.so.1", "libb.so.1")
    host.link(f"{FOLDER}/{PLUGIN}", f"/store/plugin/{PLUGIN}")
    host.link(f"{FOLDER}/liba.so.1", "/store/a/liba.so.1")
    # The folder in which a library really is, behind the link, is searched too.
    assert names(planned(host, image, PROFILE)) == {
        PLUGIN: f"/store/plugin/{PLUGIN}",
        "liba.so.1": "/store/a/liba.so.1",
        "libb.so.1": "/store/a/libb.so.1",
    }
