"""SGLang's frontend language: generation, a choice, branches and a pattern. Start a server first:

python -m sglang.launch_server --model-path MODEL --speculative-algorithm SPARSESPEC
python frontend_language.py http://localhost:30000
"""

import sys

import sglang as sgl


@sgl.function
def solve(s, problem):  # SGLang wants this name
    s += problem
    s += sgl.gen("chain", max_tokens=40, temperature=0)
    s += " so the answer is " + sgl.select("digit", choices=["1", "2", "3"])
    branches = s.fork(2)
    for branch in branches:
        branch += " because" + sgl.gen("why", max_tokens=10, temperature=0)
    s["reasons"] = [branch["why"] for branch in branches]
    s += " . number " + sgl.gen("number", max_tokens=8, regex="[0-9]{2}")


def main(url: str) -> None:
    sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    state = solve.run("a = 17 + 25 ;")
    print("chain:  ", state["chain"])
    print("digit:  ", state["digit"])
    print("reasons:", len(state["reasons"]))
    print("number: ", state["number"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:30000")
