"""The second of two ranks, as a program: runs a prompt through its shard of a model, or names a number, as told."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from kvern.engine.config import EngineConfig
from kvern.engine.kv_cache import allocate_kv
from kvern.engine.model.loader import load_model
from kvern.engine.tensor_parallel.group import join
from kvern.engine.tensor_parallel.shard import Shard
from kvern.kernels.paged_attention import plan_attention

_BLOCK_SIZE = 16


@torch.inference_mode()
def shard_logits(path: Path, shard: Shard, token_ids: list[int]) -> Tensor:
    """Return the logits of every position of one prompt: [num_tokens, vocab_size]. All ranks must call this."""
    model = load_model(EngineConfig(path, dtype="float32", device="cpu"), shard=shard)
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    kv = allocate_kv(model, _BLOCK_SIZE, num_blocks)
    attention = plan_attention(
        kv,
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        cu_query_lens=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens),
        sliding_windows=model.config.sliding_windows,
    )
    hidden = model.module(torch.tensor(token_ids), torch.arange(num_tokens), attention, kv)
    return model.module.logits(hidden)


def main(descriptor: int, rendezvous: Path) -> None:
    connection = Connection(descriptor)
    torch.set_num_threads(1)
    join(Shard(1, 2), torch.device("cpu"), rendezvous)
    while (told := connection.recv()) is not None:
        if isinstance(told, int):
            Shard(1, 2).minimum(told)
        else:
            path, token_ids = told
            shard_logits(path, Shard(1, 2), token_ids)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
