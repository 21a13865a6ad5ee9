"""Requests sorted by who goes first. Arrivals come nearly always last, so a sorted list is the cheapest queue."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from kvern.engine.request import Request

BY_ORDER = attrgetter("order")


class OrderedRequests:
    """Requests sorted by `order`, which is unique among them."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_prompt_tokens = 0
        """Of all of them together."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=BY_ORDER)
        self.num_prompt_tokens += request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        """Remove a request, whose order must not have changed since it was added."""
        index = bisect_left(self._requests, request.order, key=BY_ORDER)
        assert self._requests[index] is request
        del self._requests[index]
        self.num_prompt_tokens -= request.num_prompt_tokens

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def is_sorted(self) -> bool:
        return all(a.order < b.order for a, b in zip(self._requests, self._requests[1:], strict=False))
