from __future__ import annotations

import math

import pytest

from rota.core.errors import ConfigError
from rota.core.policy_config import PolicyConfig


@pytest.mark.parametrize("bounds", [(), (0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, math.inf), (math.nan,)])
@pytest.mark.parametrize("name", ["prefill_delayer_forward_passes_buckets", "prefill_delayer_wait_seconds_buckets"])
def test_bounds_of_a_histogram_that_do_not_rise_are_refused(name, bounds):
    with pytest.raises(ConfigError, match=f"{name} must be one or more finite numbers above 0"):
        PolicyConfig(**{name: bounds})
