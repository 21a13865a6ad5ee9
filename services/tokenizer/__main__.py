"""`python -m kvern.services.tokenizer`: one tokenizer process."""

from __future__ import annotations

from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.process import run_service
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.text import TokenizerError, load_tokenizer
from kvern.services.tokenizer.servicer import TokenizerServicer
from kvern.services.tokenizer.settings import TokenizerSettings
from kvern.services.tokenizer.workers import Workers
from kvern.v1 import tokenizer_pb2_grpc

SERVICE = "kvern.v1.TokenizerService"


async def main(settings: TokenizerSettings) -> None:
    source = find_model(settings.model, weights=False)
    tokenizers = {settings.served_model_name or source.name: load_tokenizer(source)}
    with Workers() as workers:
        async with GrpcServer(settings, [SERVICE]) as server:
            servicer = TokenizerServicer(tokenizers, workers)
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.grpc)
            await server.start()
            server.set_ready(True)
            await server.wait_for_stop()


if __name__ == "__main__":
    run_service("tokenizer", TokenizerSettings, main, expected_errors=(TokenizerError,))
