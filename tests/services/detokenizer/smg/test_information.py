"""What SMG asks of a replica beside tokens."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2
from transformers import PreTrainedTokenizerFast

from kvern.services.detokenizer.settings import DetokenizerSettings
from kvern.services.detokenizer.smg.model_files import read_model_files
from kvern.services.runtime.model_source import ModelSource, find_model
from kvern.services.runtime.settings import SettingsError
from kvern.services.runtime.text import Tokenizer, load_tokenizer
from kvern.v1 import replica_pb2
from kvern.version import __version__
from tests.services.detokenizer.scripted_engine import EOS, MAX_MODEL_LEN, VOCAB_SIZE

from .door import Door

CHAT = [{"role": "user", "content": "What is a quern?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2"))


def unzip(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as reader:
        return {name: reader.read(name) for name in reader.namelist()}


@pytest.mark.asyncio(loop_scope="package")
async def test_model_is_told_as_the_engine_has_it(door: Door) -> None:
    info = await door.stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=20)
    assert (info.model_path, info.served_model_name, info.is_generation) == ("tiny", "tiny", True)
    assert (info.max_context_length, info.vocab_size, info.model_type) == (MAX_MODEL_LEN, VOCAB_SIZE, "llama")
    assert (list(info.eos_token_ids), info.bos_token_id, info.supports_vision) == ([EOS], 1, False)


@pytest.mark.asyncio(loop_scope="package")
async def test_load_is_told_as_the_engine_has_it(door: Door) -> None:
    load = replica_pb2.ReplicaLoad(num_running=2, num_waiting=3, queued_prefill_tokens=17)
    door.engine.step(load=load)
    await door.setup.load_becomes(load)
    answer = await door.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=20)
    [told] = answer.loads
    assert (answer.version, answer.dp_rank_count, told.dp_rank) == (__version__, 1, 0)
    assert (told.num_running_reqs, told.num_waiting_reqs, told.num_total_reqs) == (2, 3, 5)
    assert told.num_waiting_uncached_tokens == 17
    door.engine.step(load=replica_pb2.ReplicaLoad())
    await door.setup.load_becomes(replica_pb2.ReplicaLoad())


@pytest.mark.asyncio(loop_scope="package")
async def test_load_of_a_rank_that_there_is_not_is_refused(door: Door) -> None:
    assert len((await door.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=0), timeout=20)).loads) == 1
    with pytest.raises(grpc.aio.AioRpcError, match="dp_rank: a replica has rank 0 only, got 1"):
        await door.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=1), timeout=20)


@pytest.mark.asyncio(loop_scope="package")
async def test_server_is_told_as_one_rank(door: Door) -> None:
    info = await door.stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=20)
    assert (info.data_parallel_size, info.block_size, info.active_requests) == (1, 16, 0)
    assert info.uptime_seconds > 0


@pytest.mark.asyncio(loop_scope="package")
async def test_archive_comes_in_chunks_of_which_the_last_has_the_sum(door: Door, tokenizer: Tokenizer) -> None:
    chunks = [chunk async for chunk in door.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=20)]
    archive = b"".join(chunk.data for chunk in chunks)
    assert all(len(chunk.data) <= 2**20 for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(archive).hexdigest()]
    assert len(chunks) > 1


@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("Embed", vllm_engine_pb2.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
async def test_what_is_not_served_is_refused_with_words(door: Door, method: str, request_message: object) -> None:
    call = getattr(door.stub, method)(request_message, timeout=20)
    with pytest.raises(grpc.aio.AioRpcError, match=f"{method}: ") as refusal:
        await (call.read() if method == "SubscribeKvEvents" else call)
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_files_of_a_gguf_make_the_tokenizer_that_it_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = unzip(read_model_files(find_model("smollm2"), tokenizer, [2, 3]).archive)
    assert set(files) == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json"
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rendered = loaded.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.transformers.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert loaded(rendered)["input_ids"] == tokenizer.encode(rendered, add_special_tokens=True)
    config, generation = json.loads(files["config.json"]), json.loads(files["generation_config.json"])
    assert (config["model_type"], config["vocab_size"], config["eos_token_id"]) == ("llama", VOCAB_SIZE, EOS)
    assert generation == {"eos_token_id": [2, 3]}


def test_files_of_a_folder_are_sent_as_they_are_and_nothing_else_of_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.transformers.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "secrets.json").write_text("{}")
    source = ModelSource(tmp_path, "odd")
    once, again = (read_model_files(source, load_tokenizer(source), [2]) for _ in range(2))
    assert once == again
    files = unzip(once.archive)
    assert "secrets.json" not in files
    assert files["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": 7}
    assert once.config == {"model_type": "odd"}


def test_events_without_a_door_are_refused() -> None:
    flags = ["--listen=unix:/tmp/d", "--engine=unix:/tmp/e"]
    with pytest.raises(SettingsError, match=r"smg_kv_events: .*needs smg_listen"):
        DetokenizerSettings.load([*flags, "--smg-kv-events"], prog="detokenizer", environ={})
    opened = DetokenizerSettings.load(flags, prog="detokenizer", environ={})
    assert (opened.smg_listen, opened.smg_salt, opened.smg_kv_events) == (None, "", False)
