from __future__ import annotations

import re

import pytest

from rota.core.errors import ModelError
from rota.engine.folders.hub import model_folder


def refuse(name: str) -> str:
    raise AssertionError(f"{name} was asked for")


def test_a_folder_that_is_here_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert model_folder(str(tmp_path), refuse) == tmp_path
    assert str(model_folder("org/model", refuse)) == "org/model"


@pytest.mark.parametrize("name", ["/nowhere/model", "./org/model", "../model", "model", "a/b/c", "~/model"])
def test_what_can_only_be_a_path_is_not_asked_of_a_hub(name):
    assert not model_folder(name, refuse).exists()


def test_a_hub_s_name_is_downloaded(tmp_path):
    assert model_folder("org/model-1.5B", lambda name: str(tmp_path / name)) == tmp_path / "org" / "model-1.5B"


def test_a_hub_that_does_not_have_it_is_a_sentence():
    def fail(_: str) -> str:
        raise OSError("404 for org/model\nand a page of details")

    with pytest.raises(ModelError, match=r"no folder org/model, and a hub does not give .*: 404 for org/model$"):
        model_folder("org/model", fail)


def test_an_adapter_in_the_place_of_a_model_is_told_by_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    sentence = (
        f"{tmp_path} is an adapter of org/base. Serve org/base, and give the adapter with --lora-paths {tmp_path}."
    )

    for name, download in ((str(tmp_path), refuse), ("org/adapter", lambda _: str(tmp_path))):
        with pytest.raises(ModelError, match=re.escape(sentence)):
            model_folder(name, download)


def test_a_model_with_an_adapter_beside_it_is_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")

    assert model_folder(str(tmp_path), refuse) == tmp_path
