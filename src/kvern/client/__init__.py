"""The Python client, synchronous and asynchronous. It needs no more than the base install.

    with Client("127.0.0.1:50051") as client:
        for event in client.chat([{"role": "user", "content": "What is a quern?"}], max_tokens=64):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

Generations yield events in the order of the protocol: Started, Scheduled, PromptLogprobs if asked for, Deltas, and one
Finished for each choice. A call that finds no server is made again, a stream that breaks is taken up where it broke,
and nothing comes twice. All errors are KvernError.
"""

from kvern.client.aio import AsyncClient, AsyncEvents
from kvern.client.channel import DEFAULT_ADDRESS
from kvern.client.errors import KvernError, TimedOut, Unreachable
from kvern.client.options import ChatOptions, GenerateOptions, Timeouts
from kvern.client.progress import Event
from kvern.client.retry import RetryPolicy
from kvern.client.sync import Client, Events
from kvern.v1.inference_pb2 import Delta, Finished, FinishReason, PromptLogprobs, Scheduled, Started

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "AsyncEvents",
    "ChatOptions",
    "Client",
    "Delta",
    "Event",
    "Events",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "KvernError",
    "PromptLogprobs",
    "RetryPolicy",
    "Scheduled",
    "Started",
    "TimedOut",
    "Timeouts",
    "Unreachable",
]
