"""To wait without end."""

from __future__ import annotations

import asyncio

_LONGER_THAN_ANY_TEST_S = 3600


async def for_ever() -> None:
    """Wait until cancelled.

    On a timer, since the loop holds who waits for one, and other tasks only by weak references.
    """
    await asyncio.sleep(_LONGER_THAN_ANY_TEST_S)
