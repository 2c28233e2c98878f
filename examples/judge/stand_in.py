"""Stands in for a judge: an OpenAI endpoint that grades as a model would, by a rule.

    python examples/judge/stand_in.py [PORT]

It reads the prompt of the reward `judge` and answers with `Grade: N`: 10 points if the last number of the answer is the
reference, else 1 point for each right line of a sum, at most 5. Replace it by a model: `llamarl serve`, vLLM, or a
service.
"""

from __future__ import annotations

import re
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

PORT = 8123
PARTS = re.compile(r"Reference: (.*?)\n\nAnswer: (.*)\n\nEnd with one line", re.DOTALL)
SUM = re.compile(r"(\d{1,9})\+(\d{1,9})=(\d{1,9})")


def grade(prompt: str) -> int:
    """Returns the grade of the answer in a prompt."""
    found = PARTS.search(prompt)
    if found is None:
        return 0
    reference, answer = found[1].strip(), found[2]
    numbers = re.findall(r"\d+", answer)
    if numbers and numbers[-1] == reference and "####" in answer:
        return 10
    right = sum(int(a) + int(b) == int(c) for a, b, c in SUM.findall(answer))
    return min(right, 5)


async def complete(request: Request) -> JSONResponse:
    """Answers a call of `/v1/chat/completions`."""
    asked = await request.json()
    text = f"Grade: {grade(asked['messages'][-1]['content'])}"
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return JSONResponse({"object": "chat.completion", "model": asked["model"], "choices": [choice]})


app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else PORT, log_level="warning")
