"""The `openai` package against a running server: a completion, a chat, a stream, and the fields for RL.

pip install openai
python examples/openai_client.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key)
    model = client.models.list().data[0].id

    completion = client.completions.create(model=model, prompt="The answer is", max_tokens=8, logprobs=1, seed=1)
    print("completion:", repr(completion.choices[0].text))

    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 2 + 3?"}]
    chat = client.chat.completions.create(
        model=model,
        messages=messages,
        max_completion_tokens=8,
        logprobs=True,
        seed=1,
        # Fields that the package does not know go into extra_body; what they add to the answer is kept as it came.
        extra_body={"return_meta_info": True, "return_token_ids": True},
    )
    extras = chat.choices[0].model_extra or {}
    meta = extras["meta_info"]
    print("chat:", repr(chat.choices[0].message.content))
    print("weight version:", meta["weight_version"], "token ids:", extras["token_ids"])

    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_completion_tokens=8,
        seed=1,
        stream=True,
    )
    print("stream:", [chunk.choices[0].delta.content for chunk in stream if chunk.choices])


if __name__ == "__main__":
    main()
