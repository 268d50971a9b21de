"""Use a running server through OpenAI's own client: a chat, a stream, several prompts, and many requests at once.

    fa-serve serve &                                          # the embedded model, on port 8000
    python examples/openai_client.py                          # or: --url http://host:port --key KEY

It imports nothing of fa_serve and needs only `pip install openai`.
"""

import argparse
import asyncio
import os

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument("--key", default=os.environ.get("FA_SERVE_API_KEY", "none"), help="API key, if the server needs one")
    arguments = parser.parse_args()
    options = {"base_url": f"{arguments.url}/v1", "api_key": arguments.key}

    with openai.OpenAI(**options) as client:
        model = client.models.list().data[0].id
        chat(client, model)
        stream(client, model)
        complete(client, model)
    asyncio.run(many(options, model))


def chat(client: openai.OpenAI, model: str) -> None:
    question = {"role": "user", "content": "What is 17 + 25?"}
    reply = client.chat.completions.create(model=model, messages=[question], temperature=0, max_completion_tokens=32)
    print(f"chat: {reply.choices[0].message.content!r} ({reply.usage.completion_tokens} tokens)")


def stream(client: openai.OpenAI, model: str) -> None:
    print("stream: ", end="")
    for chunk in client.completions.create(model=model, prompt="import os\n", max_tokens=48, temperature=0, stream=True):
        print(chunk.choices[0].text.replace("\n", "\\n"), end="", flush=True)
    print()


def complete(client: openai.OpenAI, model: str) -> None:
    """Two prompts with two samples each. The seed makes the samples the same in every run."""
    reply = client.completions.create(
        model=model, prompt=["def add(", "class Node:"], n=2, max_tokens=16, seed=1, temperature=0.7
    )
    for choice in reply.choices:
        print(f"sample {choice.index}: {choice.text!r}")


async def many(options: dict[str, str], model: str) -> None:
    async with openai.AsyncOpenAI(**options) as client:

        async def add(a: int, b: int) -> str:
            question = {"role": "user", "content": f"What is {a} + {b}?"}
            reply = await client.chat.completions.create(
                model=model, messages=[question], temperature=0, max_completion_tokens=32
            )
            return f"{a} + {b}: {reply.choices[0].message.content!r}"

        for line in await asyncio.gather(*(add(3 * i + 1, 7 * i + 2) for i in range(8))):
            print(line)


if __name__ == "__main__":
    main()
