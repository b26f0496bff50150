"""Chat through the OpenAI client. Start a server first:

python -m sglang.launch_server --model-path MODEL --speculative-algorithm SPARSESPEC
python openai_chat.py http://localhost:30000
"""

import sys

import openai


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "Count from 1 to 20."}]

    answer = client.chat.completions.create(model=model, messages=question, max_tokens=60, temperature=0)
    print("whole:   ", answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model, messages=question, max_tokens=60, temperature=0, stream=True
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    print("streamed:", "".join(parts))

    # The same seed draws the same tokens again; three answers to one prompt share its KV cache.
    drawn = [
        client.completions.create(
            model=model, prompt="1 2 3", max_tokens=20, temperature=1.0, seed=7, logprobs=1
        )
        for _ in range(2)
    ]
    print("seeded:  ", drawn[0].choices[0].text == drawn[1].choices[0].text)
    several = client.completions.create(model=model, prompt="1 2 3", max_tokens=20, temperature=1.0, n=3)
    print("n = 3:   ", len(several.choices))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:30000")
