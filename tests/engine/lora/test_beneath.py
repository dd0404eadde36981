from __future__ import annotations

from pathlib import Path

import pytest

from rota.core.errors import AdapterError
from rota.engine.lora.files.beneath import beneath
from rota.engine.lora.files.folder_files import FolderFiles


@pytest.fixture
def root(tmp_path) -> Path:
    root = tmp_path / "root"
    (root / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    return root


@pytest.mark.parametrize(
    "path", ["mine", "./mine/", "mine/deep/..", "mine/nothing/../", "nothing/../mine", "{root}/mine"]
)
def test_a_path_that_stays_inside_leads_where_it_says(root, path):
    assert beneath(root, path.format(root=root)) == root / "mine"


@pytest.mark.parametrize(
    "path",
    ["..", "../root/mine", "mine/../../root/mine", "{root}/../root/mine", "{root}x/mine", "/etc", "a\0b", "a" * 256],
)
def test_a_path_that_leaves_on_the_way_leads_nowhere(root, path):
    assert beneath(root, path.format(root=root)) is None


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("mine/deep", "mine/deep"),
        ("{root}/mine", "mine"),
        ("mine/deep/../..", ""),
        ("../root/mine", None),
        ("{root}/../other", None),
        ("../other", None),
        ("link", None),
    ],
)
def test_a_link_is_followed_step_by_step(root, target, place):
    (root / "link").symlink_to(target.format(root=root))

    assert beneath(root, "link") == (None if place is None else root / place)


def test_whether_a_neighbour_is_a_link_does_not_show(root):
    """`other/..` is the folder beside the root, or wherever the link leads."""
    before = beneath(root, "../other/../root/mine")
    (root.parent / "other").rmdir()
    (root.parent / "other").symlink_to("/")

    assert (before, beneath(root, "../other/../root/mine")) == (None, None)


def test_links_that_only_make_the_way_longer_come_to_an_end(root):
    for number in range(60):
        (root / f"l{number}").symlink_to(f"l{number + 1}/" + "a/" * 1000)

    assert beneath(root, "l0") is None


def test_a_root_that_a_link_has_replaced_is_no_root_any_more(root):
    root.rename(root.parent / "moved")
    root.symlink_to("other")

    with pytest.raises(AdapterError, match="leads to no adapter folder in the adapter root of this key"):
        FolderFiles("mine", key_root=root)
