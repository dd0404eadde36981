"""Ask the built-in model in this process: python examples/offline.py ["a prompt" ...]"""

import sys

from rota import LLM, SamplingParams


def main(prompts: list[str]) -> None:
    llm = LLM()
    params = SamplingParams(temperature=0.0, max_new_tokens=24)
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        print(f"{prompt}▸{answer.text}\n")

    (reply,) = llm.chat([{"role": "user", "content": "Name three colours."}], params)
    print(f"{reply.text} ({len(reply.token_ids)} tokens, {reply.finish_reason})")


if __name__ == "__main__":
    main(sys.argv[1:] or ["The capital of France is", "Once upon a time"])
