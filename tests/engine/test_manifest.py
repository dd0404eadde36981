"""A manifest finds every byte that is not as it was written, and reads no file that nobody has touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rota.engine.folders import builtin
from rota.engine.folders.builtin import damage_of, write_manifest

SIZE = 9 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "weights").write_bytes(os.urandom(SIZE))
    (made / "config").write_text("{}")
    write_manifest(made)
    return made


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read."""
    read: list[str] = []
    digest = builtin.sha256_of
    monkeypatch.setattr(builtin, "sha256_of", lambda path: read.append(path.name) or digest(path))
    return read


def spoil(path: Path) -> None:
    """Zeros near the end, as a disk may have them; the size stays."""
    with path.open("r+b") as file:
        file.seek(SIZE - (2 << 20))
        file.write(bytes(1 << 20))


@pytest.mark.parametrize("keeps_time", [False, True])
def test_zeros_far_behind_the_beginning_are_found(folder: Path, keeps_time: bool):
    before = (folder / "weights").stat()
    spoil(folder / "weights")
    if keeps_time:
        os.utime(folder / "weights", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert damage_of(folder) == "weights is not as it was written"


def test_another_file_in_the_place_of_one_is_found(folder: Path):
    shutil.copy2(folder / "weights", folder / "other")
    spoil(folder / "other")
    os.replace(folder / "other", folder / "weights")
    assert damage_of(folder) == "weights is not as it was written"


def test_what_nobody_has_touched_is_not_read(folder: Path, reads: list[str]):
    assert damage_of(folder) == ""
    assert reads == []


def test_a_copy_is_read_once_and_then_known(folder: Path, reads: list[str]):
    copy = Path(shutil.copytree(folder, folder.parent / "copy"))
    assert damage_of(copy) == ""
    assert sorted(reads) == ["config", "weights"]
    assert damage_of(copy) == ""
    assert len(reads) == 2
    assert {path.name for path in copy.iterdir()} == {"config", "weights", "manifest.json"}
    assert {path.name for path in folder.parent.iterdir()} == {"model", "copy"}


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"weights": 7}', '{"weights": {"bytes": 7, "head_crc32": 1}}'])
def test_a_manifest_that_is_none_is_damage(folder: Path, text: str):
    (folder / "manifest.json").write_text(text)
    assert damage_of(folder).startswith("manifest.json ")
