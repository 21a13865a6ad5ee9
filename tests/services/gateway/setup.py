"""A gateway process in front of a router that does what a test says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvern.v1.inference_pb2 import GenerateRequest
from tests.services.processes import running
from tests.services.scraping import status_address

from .http_client import until_healthy
from .scripted_router import ScriptedRouter

USER = {"role": "user", "content": "Hello"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Setup:
    """A gateway, the router behind it, and a client."""

    router: ScriptedRouter
    client: httpx.AsyncClient
    status: str
    """Where it tells its metrics."""
    log: Path

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.client.post(CHAT, json={"messages": [USER]} | fields)

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.client.post(COMPLETIONS, json={"prompt": "Hello"} | fields)

    async def message(self, **fields: object) -> dict[str, Any]:
        """Return the message of a chat's one choice, and why it ended."""
        response = await self.chat(**fields)
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}

    async def asked(self, **fields: object) -> GenerateRequest:
        """Return what the router is asked for a chat."""
        response = await self.chat(**fields)
        assert response.status_code == 200, response.text
        return self.router.received[-1]

    async def refused(self, path: str = CHAT, **fields: object) -> dict[str, Any]:
        """Return the error of a request that is refused for what it says."""
        response = await (self.chat(**fields) if path == CHAT else self.complete(**fields))
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert self.router.received == []
        return error

    async def events(self, path: str = CHAT, **fields: object) -> list[Any]:
        """Return the data of a stream's events, parsed but for the last."""
        response = await (self.chat if path == CHAT else self.complete)(stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines.pop() == ""
        data = [line.removeprefix("data: ") for line in lines]
        return [each if each == "[DONE]" else json.loads(each) for each in data]

    async def deltas(self, **fields: object) -> list[dict[str, Any]]:
        """Return what the chunks of a chat's one choice bring, but for the first and the last, which bring nothing."""
        *chunks, done = await self.events(**fields)
        assert done == "[DONE]"
        first, *deltas, last = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert (first, last) == ({"role": "assistant", "content": ""}, {})
        return deltas


@asynccontextmanager
async def starting(folder: Path, listen: str, *flags: str) -> AsyncIterator[Setup]:
    router, address, status = ScriptedRouter(), f"unix:{folder}/router.sock", status_address()
    flags = ("--listen", listen, "--router", address, "--status-listen", status, *flags)
    log = folder / "log"
    async with (
        router.serving(address),
        running("gateway", *flags, log=log),
        httpx.AsyncClient(base_url=f"http://{listen}", timeout=20) as client,
    ):
        await until_healthy(client)
        yield Setup(router, client, status, log)
