"""Options come from the dataclasses of the configuration, which refuse what cannot be."""

from __future__ import annotations

import pytest

from rota.core.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from rota.core.errors import ConfigError
from rota.core.options import build, options_of, refuse_unknown

CONFIGS = (ModelConfig, CacheConfig, SchedulerConfig, ServerConfig)


def test_every_config_field_is_an_option_with_a_sentence():
    for option in options_of(*CONFIGS).values():
        assert option.help.endswith("."), option.name


def test_a_config_takes_its_own_options_and_leaves_the_others():
    config = build(CacheConfig, {"kv_block_size": 32, "port": 80})

    assert config == CacheConfig(kv_block_size=32)


def test_a_whole_number_will_do_where_a_number_is_asked():
    assert options_of(CacheConfig)["mem_fraction_static"].check(1) == 1.0


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("port", "eighty", "port must be a whole number, not 'eighty'."),
        ("port", True, "port must be a whole number, not True."),
        ("port", None, "port must be a whole number, not None."),
        ("enable_prefix_caching", 1, "enable_prefix_caching must be true or false, not 1."),
        ("device", "tpu", "device must be one of auto, cuda, cpu, not 'tpu'."),
        ("overlap_depth", 3, "overlap_depth must be one of 1, 2, not 3."),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(name, value, sentence):
    with pytest.raises(ConfigError) as refusal:
        options_of(*CONFIGS)[name].check(value)

    assert str(refusal.value) == sentence


def test_an_unknown_name_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="kv_blocksize is not an option; did you mean kv_block_size"):
        refuse_unknown({"kv_blocksize": 16}, *CONFIGS)
    with pytest.raises(ConfigError, match="the options are model_path, load_format"):
        refuse_unknown({"zzz": 1}, *CONFIGS)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
def test_no_device_at_all_is_refused(name):
    assert getattr(ModelConfig(**{name: 4}), name) == 4
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        ModelConfig(**{name: 0})
