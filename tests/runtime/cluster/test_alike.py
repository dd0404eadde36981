from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from rota.core.config import EngineConfig, ModelConfig
from rota.runtime.cluster.driver import EngineWhereabouts, ending_of
from rota.runtime.cluster.joining import own_versions, unlike, unlike_files
from rota.runtime.ranks.meeting import facts


def model_in(folder: Path, weights: bytes = b"w" * 5000) -> EngineConfig:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return EngineConfig(model=ModelConfig(model_path=str(folder)))


def test_a_machine_with_the_versions_of_the_front_is_alike():
    own = own_versions()

    assert {"the version of python", "the version of ray", "the version of rota", "the version of torch"} <= own.keys()
    assert unlike("10.0.0.2", own, own) == ""


def test_a_machine_with_another_version_is_named_with_both_values():
    own = {"the version of ray": "2.60.0", "the version of torch": "2.12.0"}

    assert unlike("10.0.0.2", own, {"the version of ray": "2.50.0"}) == (
        "Every node must have the model and the versions of the front: node 10.0.0.2 has 2.50.0 for the version of "
        "ray, and the front has 2.60.0; node 10.0.0.2 has nothing for the version of torch, and the front has 2.12.0."
    )


def test_another_fine_tune_at_the_same_path_is_found(tmp_path):
    config = model_in(tmp_path / "model")
    own = facts(config)
    assert unlike_files("10.0.0.2", own, config) == ""

    (tmp_path / "model" / "model.safetensors").write_bytes(b"v" * 5000)
    assert "for the model's weights, and the front has" in unlike_files("10.0.0.2", own, config)


def test_a_machine_without_the_model_is_told_where_it_must_lie(tmp_path):
    config = model_in(tmp_path / "model")
    elsewhere = replace(config, model=replace(config.model, model_path=str(tmp_path / "other")))

    assert unlike_files("10.0.0.2", facts(config), elsewhere) == (
        f"Node 10.0.0.2 has no {tmp_path}/other: the model must lie at the same path on every node."
    )


@pytest.mark.parametrize(
    ("words", "is_alive", "why", "is_refused"),
    [
        (
            "ModuleNotFoundError: No module named 'rota'",
            True,
            f"Node 10.0.0.2 has no Rota that fits: pip install 'rota[ray]=={version('rota')}' there.",
            True,
        ),
        (
            "…\nModuleNotFoundError: No module named 'mine'\n…",
            True,
            "Node 10.0.0.2 has no module mine, of which this server's engines are made.",
            True,
        ),
        ("The actor died: its node failed.", False, "Node 10.0.0.2 of the Ray cluster is gone.", False),
        ("The actor is unavailable: …", True, "Node 10.0.0.2 of the Ray cluster does not answer.", False),
        ("Out of\nmemory.", True, "The engine's actor on node 10.0.0.2 ended: Out of memory.", False),
    ],
)
def test_the_end_of_an_actor_is_one_sentence(words, is_alive, why, is_refused):
    ended = ending_of(7, RuntimeError(words), EngineWhereabouts("10.0.0.2", is_alive))

    assert (ended.number, ended.why, ended.is_refused) == (7, why, is_refused)
