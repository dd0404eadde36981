"""Ask two adapters at the same time with the openai package: python examples/openai_client.py [URL]"""

import asyncio
import sys

from openai import AsyncOpenAI

QUESTION = "Why do we sleep?"


async def ask(client: AsyncOpenAI, model: str) -> str:
    """One adapter's answer, read as it streams in."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=40,
        temperature=0,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def main(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        models = [model.id async for model in client.models.list()]
        print(f"{url} serves {', '.join(models)}.\n\n{QUESTION}")
        pirate, haiku = await asyncio.gather(ask(client, "pirate"), ask(client, "haiku"))
        print(f"\npirate:\n{pirate}\n\nhaiku:\n{haiku}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
