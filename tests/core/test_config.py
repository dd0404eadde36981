from __future__ import annotations

import pytest

from rota.core.config import ModelConfig
from rota.core.errors import ConfigError


@pytest.mark.parametrize("name", ["data_parallel_size"])
def test_more_than_one_device_is_refused_with_a_sentence(name):
    assert getattr(ModelConfig(**{name: 1}), name) == 1
    with pytest.raises(ConfigError, match=f"{name} is 2, but a server runs one copy on one device"):
        ModelConfig(**{name: 2})


def test_no_device_at_all_is_refused():
    assert ModelConfig(tensor_parallel_size=4).tensor_parallel_size == 4
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at least 1, not 0"):
        ModelConfig(tensor_parallel_size=0)
