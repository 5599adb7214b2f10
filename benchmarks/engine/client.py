"""Streaming clients of an OpenAI-compatible server: ``python client.py PORT MODEL`` prints a line of JSON per burst."""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
import sys
import time
from typing import Any

BURSTS, CLIENTS, NEW = 5, 24, 64
BROKEN = 100  # clients that go away after a few tokens


async def stream(session: Any, url: str, model: str, number: int, most: int = NEW) -> tuple[float, float, str]:
    """Seconds to the first token, seconds between tokens, and the text of a request; it goes after ``most`` tokens."""
    begin = time.perf_counter()
    prompt = f"The quick brown fox {number} " * (1 + number * 7 % 40)
    asked = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "stream": True, "ignore_eos": True}
    first, text = 0.0, []
    async with session.post(url, json=asked) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begin
                text.append(json.loads(line[6:])["choices"][0]["text"])
                if len(text) == most < NEW:
                    break
    return first, (time.perf_counter() - begin - first) / max(1, len(text) - 1), "".join(text)


async def bursts(port: str, model: str) -> None:
    """Clients that come together, some times one burst after another; before them one alone."""
    import aiohttp

    url = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession() as session:
        await stream(session, url, model, 0)
        for burst in range(BURSTS):
            await together(session, url, model, str(burst), 1000 * burst)
        await asyncio.gather(*(stream(session, url, model, number, 1 + number % 9) for number in range(BROKEN)))
        await together(session, url, model, f"after {BROKEN} that broke off", 0)


async def together(session: Any, url: str, model: str, name: str, first: int) -> None:
    """A burst of clients; print its row."""
    made = await asyncio.gather(*(stream(session, url, model, first + number) for number in range(CLIENTS)))
    row = {
        "burst": name,
        "first_token_ms_p50": round(statistics.median(each[0] for each in made) * 1e3, 2),
        "first_token_ms_max": round(max(each[0] for each in made) * 1e3, 2),
        "between_tokens_ms_p50": round(statistics.median(each[1] for each in made) * 1e3, 3),
        "texts_sha256": hashlib.sha256("\n".join(each[2] for each in made).encode()).hexdigest()[:16],
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    asyncio.run(bursts(*sys.argv[1:3]))
