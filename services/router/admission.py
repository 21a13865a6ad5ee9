"""Which requests are in flight at this router."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from kvern.services.runtime.errors import AlreadyExists, ResourceExhausted

RETRY_AFTER_S = 1.0


class Admission:
    """Bounds the requests in flight and keeps their ids apart."""

    def __init__(self, max_streams: int) -> None:
        self.max_streams = max_streams
        self._requests: set[tuple[str, str]] = set()

    @property
    def num_streams(self) -> int:
        return len(self._requests)

    @contextmanager
    def admit(self, request_id: str, tenant: str = "") -> Iterator[str]:
        """Hold a place for one request and yield its id, made up if it is empty. Tenants may use the same ids.

        Raises ResourceExhausted at the bound, AlreadyExists for an id in flight.
        """
        if self.num_streams >= self.max_streams:
            raise ResourceExhausted(f"{self.max_streams} requests are in flight", retry_after_s=RETRY_AFTER_S)
        if (tenant, request_id) in self._requests:
            raise AlreadyExists(f"request_id {request_id!r} is in flight")
        request_id = request_id or uuid.uuid4().hex
        self._requests.add((tenant, request_id))
        try:
            yield request_id
        finally:
            self._requests.remove((tenant, request_id))
