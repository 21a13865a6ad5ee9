"""`python -m kvern.services.tokenizer`: one tokenizer process."""

from __future__ import annotations

from kvern.engine.block_hash import DEFAULT_KEY
from kvern.services.runtime.model_source import ModelSource, find_model
from kvern.services.runtime.process import run_service
from kvern.services.runtime.secret_file import read_digest_key
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.settings import SettingsError
from kvern.services.runtime.status import Status
from kvern.services.runtime.text import TokenizerError, load_tokenizer
from kvern.services.tokenizer.metrics import TokenizerMetrics, TokenizerState
from kvern.services.tokenizer.prefix_cache import PrefixCache
from kvern.services.tokenizer.servicer import TokenizerServicer
from kvern.services.tokenizer.settings import TokenizerSettings
from kvern.services.tokenizer.workers import Workers
from kvern.v1 import tokenizer_pb2_grpc

SERVICE = "kvern.v1.TokenizerService"


async def main(settings: TokenizerSettings, status: Status) -> None:
    key = DEFAULT_KEY if settings.digest_key_file is None else read_digest_key(settings.digest_key_file)
    tokenizers = {name: load_tokenizer(source) for name, source in find_models(settings).items()}
    with Workers(tokenizers) as workers:
        async with GrpcServer(settings, [SERVICE], status) as server:
            cache = PrefixCache(settings.text_cache_memory)
            status.registry.register(TokenizerState(workers, cache))
            metrics = TokenizerMetrics(status.registry, tokenizers)
            servicer = TokenizerServicer(tokenizers, workers, cache, metrics, key)
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.grpc)
            await server.start()
            server.set_ready(True)
            await server.wait_for_stop()


def find_models(settings: TokenizerSettings) -> dict[str, ModelSource]:
    """Return the models to serve by what clients call them."""
    source = find_model(settings.model, weights=False)
    name = settings.served_model_name or source.name
    if name in settings.more_models:
        raise SettingsError(f"more_models: {name!r} is what the first model is called")
    more = {name: find_model(model, weights=False) for name, model in settings.more_models.items()}
    return {name: source, **more}


if __name__ == "__main__":
    run_service("tokenizer", TokenizerSettings, main, expected_errors=(TokenizerError, SettingsError))
