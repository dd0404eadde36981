from __future__ import annotations

import pytest

from rota.core.config import ModelConfig
from rota.core.errors import ConfigError


@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
def test_more_than_one_device_is_refused_with_a_sentence(name):
    assert getattr(ModelConfig(**{name: 1}), name) == 1
    with pytest.raises(ConfigError, match=f"{name} is 2, but a server runs one copy on one device"):
        ModelConfig(**{name: 2})
