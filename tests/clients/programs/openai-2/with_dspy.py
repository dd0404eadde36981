"""DSPy: texts, typed predictions and chains of thought by a schema, responses, the error for overflow."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

url = f"{sys.argv[1]}/v1"
with urllib.request.urlopen(f"{url}/models") as listed:
    model = json.load(listed)["data"][0]["id"]
shared = {"api_base": url, "api_key": "none", "cache": False, "num_retries": 0, "timeout": 300, "temperature": 0.0}
dspy.configure(lm=dspy.LM(f"openai/{model}", max_tokens=200, **shared))


class Weather(dspy.Signature):
    """Whether it is warm in the city."""

    city: str = dspy.InputField()
    verdict: Literal["cold", "warm"] = dspy.OutputField()


def asked() -> None:
    assert dspy.settings.lm("Say hello.", max_tokens=20)[0]


def by_schema() -> None:
    # DSPy sends a schema only to a model that is known to take one.
    rota = ProviderDefinition.chat(AccessPolicy(provider="rota", base_url=url), compat=OpenAIChatCompat())
    register_provider(rota, supports=ModelSupport(function_calling=True, response_schema=True))
    with dspy.context(lm=dspy.LM(f"rota/{model}", max_tokens=200, **shared), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Weather)(city="Rome").verdict in ("cold", "warm")
        thought = dspy.ChainOfThought(Weather)(city="Rome")
        assert thought.reasoning
        assert thought.verdict in ("cold", "warm")


def by_responses() -> None:
    newer = dspy.LM(f"openai/{model}", model_type="responses", max_tokens=40, **shared)
    assert newer("Say hello.")[0]


def overflow() -> None:
    refused = None
    try:
        dspy.settings.lm("rain " * 20_000)
    except dspy.ContextWindowExceededError as error:
        refused = error
    assert refused


for part in (asked, by_schema, by_responses, overflow):
    part()
    print(f"{part.__name__}: works", flush=True)
