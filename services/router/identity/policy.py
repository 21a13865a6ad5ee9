"""What one tenant may do."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TenantPolicy(BaseModel):
    """What one tenant may do. What is not set is not limited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: frozenset[str] = frozenset()
    """Those it may use. Empty: all."""
    priority_cap: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Requests that ask to run earlier, by a lower number, run at this one."""
    max_concurrent: int | None = Field(default=None, ge=1, le=10**6)
    """Generate calls at once, at all routers together, and as many of Route, Tokenize and Detokenize beside them."""
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    """Prompt and output tokens, at all routers together."""

    def allows(self, model: str) -> bool:
        return not self.models or model in self.models


UNLIMITED = TenantPolicy()
