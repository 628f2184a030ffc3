"""`make tour`: the files that a launch runs through."""

from pathlib import Path

from tests import tour


def test_a_launch_is_followed_from_the_command_to_torchruns_words(tmp_path: Path) -> None:
    launch = tour.stages()[0]
    tour.follow(launch, tmp_path / "launch")
    tour.read(launch, tmp_path / "launch")
    files = list(launch.files)
    places = [
        files.index(f"entrypoint/{name}.py")
        for name in ("cli", "detect/slurm", "rendezvous/address", "launch/torchrun")
    ]
    assert places == sorted(places)
    assert all(visited.functions and visited.lines for visited in launch.files.values())
    assert len(files) <= launch.most
