"""A tokenizer process, over its socket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.engine.block_hash import DIGEST_BYTES, DIGEST_VERSION
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import load_tokenizer
from kvern.services.tokenizer.workers import MAX_BYTES
from kvern.v1 import inference_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tests.services import small_tokenizers
from tests.services.processes import running
from tests.services.scraping import GRPC_SERVICE, scrape, status_address

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_S = 30.0

METRICS = GRPC_SERVICE | {
    "kvern_tokenizer_encode_seconds",
    "kvern_tokenizer_tokens_total",
    "kvern_tokenizer_queue",
    "kvern_tokenizer_refused_total",
    "kvern_tokenizer_prefix_cache_hit_bytes_total",
    "kvern_tokenizer_prefix_cache_lookup_bytes_total",
    "kvern_tokenizer_prefix_cache_bytes",
}

_Detail = TypeVar("_Detail", bound=Message)


@asynccontextmanager
async def serving(folder: Path, *flags: str, status: str = "") -> AsyncIterator[grpc.aio.Channel]:
    """Run a tokenizer, and yield a channel to it once it serves."""
    address = f"unix:{folder}/tokenizer.sock"
    flags = (*flags, "--listen", address, "--status-listen", status or status_address())
    async with (
        running("tokenizer", *flags, log=folder / "log"),
        open_channel(address) as channel,
    ):
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="kvern.v1.TokenizerService"), timeout=TIMEOUT_S, wait_for_ready=True
        )
        async for response in call:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        call.cancel()
        yield channel


@pytest.fixture(scope="module")
def status() -> str:
    """Where the tokenizer tells its metrics."""
    return status_address()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(tmp_path_factory: pytest.TempPathFactory, status: str) -> AsyncIterator[grpc.aio.Channel]:
    folder = tmp_path_factory.mktemp("tokenizer")
    async with serving(folder, "--served-model-name", "tiny", status=status) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.aio.Channel) -> tokenizer_pb2_grpc.TokenizerServiceAsyncStub:
    return tokenizer_pb2_grpc.TokenizerServiceStub(channel)


def unpack(error: grpc.aio.AioRpcError, detail: _Detail) -> _Detail:
    """Return what an error's details hold of a kind."""
    details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    for item in status_pb2.Status.FromString(details).details:
        item.Unpack(detail)
    return detail


async def refused(call: grpc.aio.UnaryUnaryCall[object, object]) -> tuple[grpc.StatusCode, str, str]:
    """Return a failing call's status, its message, and the field at fault."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    violations = unpack(raised.value, error_details_pb2.BadRequest()).field_violations
    return raised.value.code(), raised.value.details() or "", ",".join(violation.field for violation in violations)


async def test_info_names_the_model_and_its_limits(stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub) -> None:
    response = await stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest())
    [info] = response.tokenizers
    fingerprint = load_tokenizer(find_model("smollm2")).fingerprint
    assert (info.model, info.vocab_size, info.fingerprint) == ("tiny", 49152, fingerprint)
    assert info.has_chat_template
    assert response.digest_version == DIGEST_VERSION


async def test_prompt_encoded_decodes_to_what_it_was(stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub) -> None:
    text = "Grüezi, 日本! <|im_end|>"
    hashing = tokenizer_pb2.BlockHashing(contract="c", block_size=4)
    encoded = await stub.EncodePrompt(tokenizer_pb2.EncodePromptRequest(model="tiny", text=text, hashings=[hashing]))
    [digests] = encoded.block_digests
    assert len(digests) == len(encoded.token_ids) // 4 * DIGEST_BYTES > 0
    for skip, expected in ((None, "Grüezi, 日本! "), (True, "Grüezi, 日本! "), (False, text)):
        request = tokenizer_pb2.DecodeTokensRequest(token_ids=encoded.token_ids, skip_special_tokens=skip)
        assert (await stub.DecodeTokens(request)).text == expected


async def test_metrics_tell_of_every_text_and_of_what_the_cache_saved(
    stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub, status: str
) -> None:
    before = await scrape(status)
    before.assert_has(METRICS)
    part = "<|im_start|>" + "many words " * 200
    request = tokenizer_pb2.EncodePromptRequest(text=part + "<|im_end|> and the end")
    num_tokens = 0
    for _ in range(2):
        num_tokens += len((await stub.EncodePrompt(request)).token_ids)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.EncodePrompt(tokenizer_pb2.EncodePromptRequest(model="made up", text="Hi"))
    after = await scrape(status)

    def more(name: str, **labels: str) -> float:
        return after(f"kvern_tokenizer_{name}", **labels) - before(f"kvern_tokenizer_{name}", **labels)

    assert more("encode_seconds_count") == more("encode_seconds_count", model="tiny") == 2
    assert more("tokens_total", model="tiny") == num_tokens
    assert more("prefix_cache_lookup_bytes_total") == 2 * more("prefix_cache_hit_bytes_total") == 2 * len(part)
    assert more("prefix_cache_bytes") > 0
    assert (after("kvern_tokenizer_queue"), more("refused_total")) == (0, 0)
    assert after("kvern_ready") == 1


async def test_unknown_model_is_not_found(stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.EncodePrompt(tokenizer_pb2.EncodePromptRequest(model="huge", text="Hi"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'huge'" in (raised.value.details() or "")
    assert "tiny" in (raised.value.details() or "")


async def test_empty_prompt_is_refused_and_the_next_request_works(
    stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub,
) -> None:
    """B07."""
    code, message, field = await refused(stub.EncodePrompt(tokenizer_pb2.EncodePromptRequest(text="")))
    assert (code, message, field) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "text: the prompt has no tokens",
        "text",
    )
    assert (await stub.EncodePrompt(tokenizer_pb2.EncodePromptRequest(text="Hi"))).token_ids


@pytest.mark.parametrize("bad", [49152, 2**32 - 1])
async def test_ids_outside_the_vocabulary_are_refused(
    stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub, bad: int
) -> None:
    """B09, B10."""
    code, message, field = await refused(stub.DecodeTokens(tokenizer_pb2.DecodeTokensRequest(token_ids=[bad])))
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "ids[0]")
    assert "49152" in message
    prompt = tokenizer_pb2.EncodePromptRequest(token_ids=inference_pb2.TokenIds(ids=[bad]))
    assert (await refused(stub.EncodePrompt(prompt)))[2] == "token_ids.ids[0]"


async def test_health_answers_while_large_texts_are_encoded(
    channel: grpc.aio.Channel, stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub
) -> None:
    """B14: each check is answered while the encoding that it was sent after is still going on."""
    request = tokenizer_pb2.EncodePromptRequest(text="Some words, again and again. " * 50_000)
    health = health_pb2_grpc.HealthStub(channel)
    encoding = [asyncio.ensure_future(stub.EncodePrompt(request, timeout=60)) for _ in range(2)]
    num_answers = 0
    while not all(call.done() for call in encoding):
        await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        num_answers += 1
    await asyncio.gather(*encoding)
    assert num_answers > 5


async def test_what_is_too_much_is_refused_while_health_and_small_texts_are_answered(
    channel: grpc.aio.Channel, stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub
) -> None:
    """B15."""
    large = tokenizer_pb2.EncodePromptRequest(text="Some words, again and again. " * 40_000)
    num_calls = MAX_BYTES // large.ByteSize() + 20
    calls = [asyncio.ensure_future(stub.EncodePrompt(large)) for _ in range(num_calls)]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        refusal = next(error for error in (call.exception() for call in done) if error)
        assert isinstance(refusal, grpc.aio.AioRpcError)
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert unpack(refusal, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() > 0
        assert (await stub.EncodePrompt(tokenizer_pb2.EncodePromptRequest(text="Hi"), timeout=TIMEOUT_S)).token_ids
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert any(not call.done() for call in waiting)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_several_models_are_served_by_name(tmp_path: Path) -> None:
    letters = small_tokenizers.save(small_tokenizers.sentencepiece(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    async with serving(tmp_path, "--more-models", f"org/letters={tmp_path}") as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        infos = (await stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest())).tokenizers
        assert [info.model for info in infos] == ["smollm2", "org/letters"]
        for model, source in (("smollm2", find_model("smollm2")), ("org/letters", letters)):
            encoded = await stub.EncodePrompt(tokenizer_pb2.EncodePromptRequest(model=model, text="ab"))
            assert encoded.token_ids == load_tokenizer(source).encode("ab", add_special_tokens=True)
        code, message, field = await refused(stub.EncodePrompt(tokenizer_pb2.EncodePromptRequest(text="ab")))
        assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
        assert "org/letters, smollm2" in message


async def test_model_that_cannot_be_loaded_ends_the_process_with_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF and nothing else")
    command = [sys.executable, "-m", "kvern.services.tokenizer", "--listen", f"unix:{tmp_path}/t.sock", "--model", bad]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, log = await process.communicate()
    assert process.returncode == 1
    assert b"bad.gguf" in log
    assert b"Traceback" not in log
