from __future__ import annotations

import pytest

from rota.core.config import ModelConfig
from rota.core.errors import ConfigError


@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
def test_no_device_at_all_is_refused(name):
    assert getattr(ModelConfig(**{name: 4}), name) == 4
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        ModelConfig(**{name: 0})
