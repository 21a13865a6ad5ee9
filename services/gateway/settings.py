"""Settings of the HTTP gateway."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from kvern.services.runtime.settings import Addresses, ServiceSettings, check_tcp_address


class GatewaySettings(ServiceSettings):
    """Kvern's HTTP gateway: OpenAI's API in front of a router."""

    listen: Addresses = Field(min_length=1)
    """Addresses to serve HTTP on, as host:port; repeat, or join with commas."""

    router: str = Field(min_length=1)
    """Address of the router: unix:/path or host:port."""

    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = "auto"
    """How models write tool calls. auto goes by whichever marker comes; none leaves them in the text."""

    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """How models write reasoning. auto: from <think>, which the chat template may write, to </think>; think: likewise,
    and all answers begin in it; none leaves it in the text."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_tcp_address(address) for address in addresses)
