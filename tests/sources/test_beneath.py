from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rota.core.errors import AdapterError
from rota.engine.lora.files.folder import FolderFiles
from rota.sources.beneath import Beneath, LeavesError


@pytest.fixture
def root(tmp_path) -> Path:
    root = tmp_path / "root"
    (root / "mine" / "deep").mkdir(parents=True)
    (root / "mine" / "note").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note").write_text("other")
    return root


@pytest.fixture
def place(root) -> Iterator[Beneath]:
    open_before = len(os.listdir("/proc/self/fd"))
    place = Beneath(root)
    yield place
    place.close()
    assert len(os.listdir("/proc/self/fd")) == open_before


def read(place: Beneath, name: str) -> str:
    descriptor, _ = place.open(name)
    with os.fdopen(descriptor) as file:
        return file.read()


@pytest.mark.parametrize("path", ["mine", "./mine/", "mine/deep/..", "{root}/mine", "mine/deep/../../mine"])
def test_a_path_that_stays_inside_leads_where_it_says(root, place, path):
    place.enter(path.format(root=root))

    assert place.path == root / "mine"
    assert read(place, "note") == "mine"


@pytest.mark.parametrize(
    "path",
    ["..", "../root/mine", "mine/../../root/mine", "{root}/../root/mine", "{root}x/mine", "/etc", "a/" * 3000],
)
def test_a_path_that_leaves_on_the_way_leads_nowhere(root, place, path):
    with pytest.raises(LeavesError):
        place.enter(path.format(root=root))


@pytest.mark.parametrize("path", ["nothing/../mine", "mine/note", "mine/note/..", "a" * 256, "a\0b"])
def test_a_way_over_what_is_no_folder_is_no_way(place, path):
    with pytest.raises((OSError, ValueError)):
        place.enter(path)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("mine/deep", "mine/deep"),
        ("{root}/mine", "mine"),
        ("mine/deep/../..", "."),
        ("../root/mine", None),
        ("{root}/../other", None),
        ("../other", None),
        ("link", None),
    ],
)
def test_a_link_is_followed_step_by_step(root, place, target, found):
    (root / "link").symlink_to(target.format(root=root))

    if found is None:
        with pytest.raises(LeavesError):
            place.enter("link")
    else:
        place.enter("link")
        assert place.path == root / found


@pytest.mark.parametrize(("target", "leaves"), [("../mine/note", False), ("../../other/note", True)])
def test_a_link_to_a_file_starts_at_the_folder_that_it_lies_in(root, place, target, leaves):
    (root / "mine" / "link").symlink_to(target)
    place.enter("mine")

    if leaves:
        with pytest.raises(LeavesError):
            place.open("link")
    else:
        assert read(place, "link") == "mine"


def test_whether_a_neighbour_is_a_link_does_not_show(root, place):
    """`other/..` is the folder beside the root, or wherever the link leads."""
    for _ in range(2):
        with pytest.raises(LeavesError):
            place.enter("../other/../root/mine")
        (root.parent / "other" / "note").unlink(missing_ok=True)
        with suppress(OSError):
            (root.parent / "other").rmdir()
            (root.parent / "other").symlink_to("/")


def test_links_that_only_make_the_way_longer_come_to_an_end(root, place):
    for number in range(60):
        (root / f"l{number}").symlink_to(f"l{number + 1}/" + "a/" * 1000)

    with pytest.raises(LeavesError):
        place.enter("l0")


def test_a_way_that_is_deeper_than_any_adapter_takes_no_descriptors_from_others(root, place):
    (root / "/".join("d" * 100)).mkdir(parents=True)

    with pytest.raises(LeavesError):
        place.enter("/".join("d" * 100))


def test_a_pipe_or_a_folder_is_no_file_and_nobody_waits_for_it(root, place):
    os.mkfifo(root / "pipe")

    for name in ("pipe", "mine", "mine/..", "nothing"):
        with pytest.raises(FileNotFoundError):
            place.open(name)


def test_a_root_that_a_link_has_replaced_is_no_root_any_more(root):
    root.rename(root.parent / "moved")
    root.symlink_to("other")

    with (
        pytest.raises(AdapterError, match="leads to no adapter folder in the adapter root of this key"),
        FolderFiles("mine", key_root=root),
    ):
        pass


def test_what_takes_the_place_of_a_folder_later_is_not_seen(root, place):
    place.enter("mine")
    (root / "mine").rename(root / "old")
    (root / "mine").symlink_to("../other")

    assert read(place, "note") == "mine"


def test_no_exchange_with_a_link_gets_a_file_outside_opened(root, place):
    """Each name is tried while another thread exchanges it with a link that leads out."""
    libc, at_cwd, exchange = ctypes.CDLL(None, use_errno=True), -100, 2
    (root / "mine" / "note.link").symlink_to("../../other/note")
    (root / "mine.link").symlink_to("../other")
    pairs = [(os.fsencode(root / name), os.fsencode(root / f"{name}.link")) for name in ("mine/note", "mine")]
    tried, is_over = threading.Event(), threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            for one, other in pairs:
                assert libc.renameat2(at_cwd, one, at_cwd, other, exchange) == 0
                assert libc.renameat2(at_cwd, one, at_cwd, other, exchange) == 0
            tried.set()

    swapper = threading.Thread(target=swap)
    swapper.start()
    tried.wait()
    found, left = set[str](), 0
    for _ in range(2000):
        try:
            found.add(read(place, "mine/note"))
        except (LeavesError, OSError):
            left += 1
    is_over.set()
    swapper.join()

    assert found <= {"mine"}
