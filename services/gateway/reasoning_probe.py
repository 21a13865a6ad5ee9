"""Whether answers begin within reasoning, because the model's chat template opens it for them."""

from __future__ import annotations

import math
import time
from collections import OrderedDict

from kvern.services.gateway.chat_request import ChatCompletionRequest
from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.router_client import Metadata, RouterClient
from kvern.v1.inference_pb2 import Chat, ChatMessage, DetokenizeRequest, TokenizeRequest

_OPENING = "<think>"
_NUM_LAST_TOKENS = 16
"""Of a prompt. More than the opening and the space after it take, however they are split."""

MAX_AGE_S = 60.0
"""How long what was found is believed, in seconds: another model may come under the same name."""

_MAX_KNOWN = 256
_MAX_VARIABLES_CHARS = 1024

_ANY_CHAT = [ChatMessage(role="user", content="Hello")]


class ReasoningProbe:
    """Looks how the prompt of a small chat ends, for each model and each set of template variables, and remembers."""

    def __init__(self, router: RouterClient, max_age_s: float = MAX_AGE_S) -> None:
        self._router = router
        self._max_age_s = max_age_s
        self._known: OrderedDict[tuple[str, str], tuple[float, bool]] = OrderedDict()
        """When each was found, and what."""

    async def begins_in_reasoning(self, body: ChatCompletionRequest, model: str, metadata: Metadata) -> bool:
        """Return whether a model's answer to a chat begins so. False where that cannot be found out."""
        if body.continue_final_message or body.add_generation_prompt is False:
            return False
        variables = body.template_kwargs_json
        if len(variables) > _MAX_VARIABLES_CHARS:
            return False
        key = (model, variables)
        found_at, opens = self._known.get(key, (-math.inf, False))
        if time.monotonic() - found_at < self._max_age_s:
            return opens
        try:
            opens = await self._opens_reasoning(*key, metadata)
        except ApiError:
            return False
        self._remember(key, opens)
        return opens

    def _remember(self, key: tuple[str, str], opens: bool) -> None:
        self._known[key] = time.monotonic(), opens
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _opens_reasoning(self, model: str, variables: str, metadata: Metadata) -> bool:
        chat = Chat(messages=_ANY_CHAT, template_kwargs_json=variables)
        tokenized = await self._router.tokenize(TokenizeRequest(model=model, chat=chat), metadata, str)
        last = DetokenizeRequest(model=model, ids=tokenized.ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
        return (await self._router.detokenize(last, metadata, str)).text.rstrip().endswith(_OPENING)
