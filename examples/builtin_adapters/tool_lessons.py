"""The built-in adapter `tools` is taught to call the functions that it is given, and to say what they gave back."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

BOOK: dict[str, Any] = tomllib.loads(Path(__file__).with_name("tools.toml").read_text("utf-8"))
Function = dict[str, Any]
FUNCTIONS: list[Function] = BOOK["functions"]
HELD: list[Function] = BOOK["held"]
MOST_OTHERS = 3  # functions beside the right one
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        return f"<tool_call>\n{json.dumps(self._asdict(), ensure_ascii=False)}\n</tool_call>"


class Talk(str):
    """A user's message with tools beside it, what was called since, and the calls that are now right."""

    tools: tuple[dict[str, Any], ...]
    since: tuple[dict[str, Any], ...]
    calls: tuple[Call, ...]
    told: str  # what the answer must tell of a result

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": str(self)}, *self.since]


def talk(
    text: str, tools: Sequence[Any], since: Sequence[Any] = (), calls: Sequence[Call] = (), told: str = ""
) -> Talk:
    made = Talk(text)
    made.tools, made.since, made.calls, made.told = tuple(tools), tuple(since), tuple(calls), told
    return made


class Asked(NamedTuple):
    """A question that one function answers, the function as a client describes it, and the right call."""

    question: str
    tool: dict[str, Any]
    call: Call
    reply: str
    result: str


def ask(function: Function, chance: Random, question: str | None = None) -> Asked:
    """Names and values are drawn, so that they must be read and cannot be known by heart."""
    name = chance.choice(function["names"])
    names = {key: chance.choice(one.get("names", [key])) for key, one in function["parameters"].items()}
    values = {key: _value(one, chance) for key, one in function["parameters"].items()}
    question = question or chance.choice(function["questions"])
    asked = {key for key in values if "{" + key + "}" in question or not function["parameters"][key].get("optional")}
    arguments = {names[key]: value for key, value in values.items() if key in asked}
    number = str(chance.randint(2, 999))
    return Asked(
        question.format(**values),
        _tool(function, name, names, chance),
        Call(name, arguments),
        function.get("reply", "").format(**values, n=number),
        function.get("result", "").replace("{n}", number),
    )


def draw(chance: Random, plain: Sequence[tuple[str, str]]) -> tuple[Talk, str]:
    """A lesson: mostly a call, else what a function gave back, two calls at once, or an answer without a call."""
    kind = chance.random()
    asked = ask(_any(chance), chance)
    if kind < 0.15 and asked.reply:
        return _told(asked, chance)
    if kind < 0.2:
        question, answer = chance.choice(plain)
        return talk(question, _others(FUNCTIONS, None, chance) or [asked.tool]), answer
    if kind < 0.3:
        return _twice(chance)
    tools = _shuffled([asked.tool, *_others(FUNCTIONS, asked.call.name, chance)], chance)
    return talk(asked.question, tools, calls=[asked.call]), asked.call.text


def held() -> tuple[Talk, ...]:
    """The examination: two questions to each function that no lesson has, beside others of both kinds."""
    chance = Random("held tools")
    talks = []
    for function in HELD:
        for question in function["questions"]:
            asked = ask(function, chance, question)
            others = _others([*HELD, *FUNCTIONS], asked.call.name, chance)
            talks.append(talk(asked.question, _shuffled([asked.tool, *others], chance), calls=[asked.call]))
    return tuple(talks)


def check(prompt: str, answer: str) -> bool:
    """Are these the right calls, with the right arguments? Or, where none is due, words that tell the result?"""
    if not isinstance(prompt, Talk):
        return False
    found = CALL.findall(answer)
    if not prompt.calls:
        return not found and bool(answer.strip()) and prompt.told in answer
    if CALL.sub("", answer).strip() or len(found) != len(prompt.calls):
        return False
    return all(_is_call(text, call) for text, call in zip(found, prompt.calls, strict=True))


def _is_call(text: str, call: Call) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != {"name", "arguments"} or found["name"] != call.name:
        return False
    return isinstance(found["arguments"], dict) and _folded(found["arguments"]) == _folded(call.arguments)


def _folded(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.casefold() if isinstance(value, str) else value for name, value in arguments.items()}


def _told(asked: Asked, chance: Random) -> tuple[Talk, str]:
    called = {"type": "function", "function": {"name": asked.call.name, "arguments": asked.call.arguments}}
    since = [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": asked.result},
    ]
    tools = _shuffled([asked.tool, *_others(FUNCTIONS, asked.call.name, chance)], chance)
    return talk(asked.question, tools, since, told=asked.reply), asked.reply


def _twice(chance: Random) -> tuple[Talk, str]:
    """One function for two things, or two functions."""
    one, two = ask(_any(chance), chance), ask(_any(chance), chance)
    if one.call.name == two.call.name:
        return _twice(chance)
    question = f"{one.question} {chance.choice(('And then:', 'Also:', 'After that:'))} {two.question}"
    calls = [one.call, two.call]
    tools = _shuffled([one.tool, two.tool], chance)
    return talk(question, tools, calls=calls), "\n".join(call.text for call in calls)


def _any(chance: Random, functions: list[Function] = FUNCTIONS) -> Function:
    return made(chance) if functions is FUNCTIONS and chance.random() < 0.5 else chance.choice(functions)


def made(chance: Random) -> Function:
    """A function that is put together, so that hardly one comes twice."""
    verb, noun = chance.choice(BOOK["made"]["verbs"]), chance.choice(BOOK["made"]["nouns"])
    chosen = chance.sample(BOOK["made"]["parameters"], chance.randint(1, 3))
    # Its words may come in another order than its parameters.
    asked = chance.sample(chosen, len(chosen))
    words = [chance.choice(one["words"]).format("{" + one["names"][0] + "}") for one in asked]
    opener = chance.choice(BOOK["made"]["openers"])
    question = f"{opener}{verb} the {noun} {' '.join(words)}" + ("?" if opener.startswith("C") else ".")
    return {
        "names": [f"{verb}_{noun}"],
        "description": f"{verb.capitalize()} a {noun}.",
        "parameters": {one["names"][0]: one for one in chosen},
        "questions": [question[0].upper() + question[1:]],
    }


def _others(functions: list[Function], name: str | None, chance: Random) -> list[dict[str, Any]]:
    chosen = [_any(chance, functions) for _ in range(chance.randint(0, MOST_OTHERS))]
    tools = [ask(function, chance).tool for function in chosen if name not in function["names"]]
    return list({tool["function"]["name"]: tool for tool in tools}.values())


def _shuffled(tools: list[dict[str, Any]], chance: Random) -> list[dict[str, Any]]:
    return chance.sample(tools, len(tools))


def _value(parameter: dict[str, Any], chance: Random) -> Any:
    if "enum" in parameter:
        return chance.choice(parameter["enum"])
    if "range" in parameter:
        return chance.randint(*parameter["range"])
    if parameter["type"] == "boolean":
        return True
    return chance.choice(BOOK["values"][parameter["values"]])


def _tool(function: Function, name: str, names: dict[str, str], chance: Random) -> dict[str, Any]:
    """As clients write one: some with titles, some strict, some without descriptions of parameters."""
    has_titles, has_about = chance.random() < 0.3, chance.random() < 0.7
    properties = {}
    for key, one in function["parameters"].items():
        schema = {"title": names[key].replace("_", " ").title()} if has_titles else {}
        schema |= {"type": one["type"]} | ({"enum": one["enum"]} if "enum" in one else {})
        properties[names[key]] = schema | ({"description": one["about"]} if has_about else {})
    required = [names[key] for key, one in function["parameters"].items() if not one.get("optional")]
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if chance.random() < 0.3:
        parameters["additionalProperties"] = False
    described = {"name": name, "description": function["description"], "parameters": parameters}
    return {"type": "function", "function": described}
