from __future__ import annotations

import math

import pytest

from rota.core.config import CacheConfig, ModelConfig, SchedulerConfig
from rota.core.errors import ConfigError, RequestError
from rota.core.request import Request, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", 3.0),
        ("seed", -1),
        ("logprobs", 21),
        ("stop", ("",)),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),
        ("logit_bias", ((5, 100.5),)),
        ("logit_bias", ((5, math.nan),)),
        ("logit_bias", ((-5, 1.0),)),
        ("logit_bias", ((5, 1.0), (5, 2.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(1025))),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (1, True)),
        ("allowed_token_ids", (1, -1)),
        ("bad_words", ((),)),
        ("bad_words", ((1, 2.0),)),
        ("bad_words", ((1,),) * 1025),
        ("top_n_sigma", 0.0),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(RequestError, match=field) as refusal:
        SamplingParams.from_fields({field: value})
    assert refusal.value.fault.param == field


def test_an_unknown_field_is_refused_with_the_list_of_known_ones():
    with pytest.raises(RequestError, match=r"'temprature' is not a sampling field; the fields are .*temperature"):
        SamplingParams.from_fields({"temprature": 0.5})


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt is empty"):
        Request(request_id="r0", prompt=(), sampling=SamplingParams(), arrived_at=0.0)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (CacheConfig, {"kv_block_size": 12}),
        (CacheConfig, {"kv_block_size": 4}),
        (CacheConfig, {"kv_blocks": 1}),
        (CacheConfig, {"mem_fraction_static": 1.5}),
        (ModelConfig, {"context_length": 1}),
        (SchedulerConfig, {"max_running_requests": 0}),
        (SchedulerConfig, {"max_queued_requests": 0}),
        (SchedulerConfig, {"chunked_prefill_size": 0}),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_the_name_of_its_field(config, values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        config(**values)
