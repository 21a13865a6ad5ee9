"""A decoder's forward pass in bfloat16 on a CPU, as one program of compiled kernels.

The kernels are those that its modules call, so the bits are the same. What is gone is what lies between two calls: on a
small model as long as the calls themselves, and more where other processes want the cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvern.engine.model.attention import Attention
from kvern.engine.model.causal_lm import CausalLM, Decoder
from kvern.engine.model.decoder_layer import DecoderLayer
from kvern.engine.model.language_model import Forward, LanguageModel
from kvern.engine.model.layers import Linear, RMSNorm
from kvern.engine.model.mlp import MLP
from kvern.kernels.cpu import Argument, Operation
from kvern.kernels.cpu_program import Program
from kvern.kernels.gated_activation import GatedActivation
from kvern.kernels.gated_activation.cpu import gate_operation
from kvern.kernels.paged_attention import AttentionMetadata
from kvern.kernels.paged_attention.cpu import LayerLaunches, Plan
from kvern.kernels.rms_norm.cpu import norm_operation
from kvern.kernels.rotary_kv.cpu import rotary_operation

_NUM_TOKENS, _SLOTS = "num_tokens", "slots"


class _Unsupported(Exception):
    """A part of the model is no compiled kernel."""


def compile_decoder(module: LanguageModel, kv: Tensor, max_num_tokens: int) -> Forward:
    """Return what computes a model's hidden states: a program, or the module itself where not all of it can be in one.

    kv: the cache that it will be called with; max_num_tokens: most of a step. What a program returns holds until the
    next step.
    """
    if not isinstance(module, CausalLM) or module.shard.size > 1 or kv.dtype is not torch.bfloat16:
        return module
    try:
        return CpuDecoder(module.model, kv, max_num_tokens)
    except _Unsupported:
        return module


class CpuDecoder:
    """Token ids to hidden states. One cache, and at most so many tokens at a time."""

    def __init__(self, decoder: Decoder, kv: Tensor, max_num_tokens: int) -> None:
        self._decoder = decoder
        layers = [(_checked(layer), _checked_mlp(layer)) for layer in decoder.layers]
        attentions = [layer.self_attn for layer, _ in layers]
        self._memory = memory = _Memory(*layers[0], max_num_tokens)
        self._launches = LayerLaunches(
            kv,
            attentions[0].num_heads,
            [attention.scale for attention in attentions],
            [attention.sliding_window for attention in attentions],
            [attention.softcap for attention in attentions],
        )
        operations = [operation for layer, mlp in layers for operation in self._operations(layer, mlp, kv)]
        self._program = Program([*operations, memory.add_norm(decoder.norm)])

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv: Tensor) -> Tensor:
        assert isinstance(attention.plan, Plan)
        num_tokens, memory, decoder = len(token_ids), self._memory, self._decoder
        memory.embedded[:num_tokens] = decoder.embed_tokens(token_ids)
        slots = attention.slot_mapping.contiguous()
        rotations = [embedding(positions, kv.dtype) for embedding in decoder.rotary_embeddings]
        symbols = {_NUM_TOKENS: num_tokens, _SLOTS: slots.data_ptr()}
        for index, (cos, sin) in enumerate(rotations):
            symbols |= zip(_rotation(index), (cos.data_ptr(), sin.data_ptr()), strict=True)
        self._launches.prepare(attention.plan, memory.queries, memory.attended)
        self._program.run(torch.get_num_threads(), symbols)
        return memory.normed[:num_tokens]

    def _operations(self, layer: DecoderLayer, mlp: MLP, kv: Tensor) -> Iterator[Operation]:
        memory, attention = self._memory, layer.self_attn
        yield (memory.norm if attention.layer == 0 else memory.add_norm)(layer.input_layernorm)
        yield _product(attention.qkv_proj, memory.normed, memory.heads)
        yield self._rotation(attention, kv)
        yield self._launches.operation(attention.layer)
        yield _product(attention.o_proj, memory.attended, memory.added)
        yield memory.add_norm(layer.post_attention_layernorm)
        yield _product(mlp.gate_up_proj, memory.normed, memory.gate_up)
        yield memory.gate(mlp)
        yield _product(mlp.down_proj, memory.gated, memory.added)

    def _rotation(self, attention: Attention, kv: Tensor) -> Operation:
        memory, rotary_dim = self._memory, 0
        tables: tuple[Argument, Argument] = (0, 0)
        if attention.rotation is not None:
            tables = _rotation(attention.rotation)
            rotary_dim = 2 * len(self._decoder.rotary_embeddings[attention.rotation].get_buffer("frequencies"))
        return rotary_operation(
            memory.heads.data_ptr(),
            attention.num_heads,
            *tables,
            rotary_dim,
            kv,
            attention.layer,
            _SLOTS,
            memory.queries.data_ptr(),
            _NUM_TOKENS,
        )


class _Memory:
    """What layers write for each other: [max_num_tokens, ...] each."""

    def __init__(self, layer: DecoderLayer, mlp: MLP, max_num_tokens: int) -> None:
        attention, size = layer.self_attn, mlp.gate_up_proj.parts["up_proj"]
        hidden_size = len(layer.input_layernorm.weight)
        num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim

        def empty(*shape: int) -> Tensor:
            return torch.empty(max_num_tokens, *shape, dtype=torch.bfloat16)

        self.residual, self.normed, self.added = empty(hidden_size), empty(hidden_size), empty(hidden_size)
        self.embedded, self._next_residual = self.residual, empty(hidden_size)
        self.heads = empty(num_heads + 2 * num_kv_heads, head_dim)
        self.queries, self.attended = empty(num_heads, head_dim), empty(num_heads, head_dim)
        self.gate_up, self.gated = empty(2 * size), empty(size)

    def norm(self, norm: RMSNorm) -> Operation:
        return self._norm(norm, self.embedded, 0, 0)

    def add_norm(self, norm: RMSNorm) -> Operation:
        """Norm what was added last and the residual, and let their sum be the residual of whoever comes next.

        It is not written where the old one lies: a loop over what overlaps is not compiled to vectors.
        """
        operation = self._norm(norm, self.added, self.residual.data_ptr(), self._next_residual.data_ptr())
        self.residual, self._next_residual = self._next_residual, self.residual
        return operation

    def _norm(self, norm: RMSNorm, x: Tensor, residual: int, total: int) -> Operation:
        addresses = x.data_ptr(), residual, norm.weight, self.normed.data_ptr(), total
        return norm_operation(*addresses, _NUM_TOKENS, norm.eps, unit_offset=norm.unit_offset)

    def gate(self, mlp: MLP) -> Operation:
        activation = GatedActivation[mlp.activation.name]
        x, out, size = self.gate_up.data_ptr(), self.gated.data_ptr(), self.gated.shape[1]
        return gate_operation(x, activation, out, _NUM_TOKENS, size)


def _rotation(index: int) -> tuple[str, str]:
    return f"cos_{index}", f"sin_{index}"


def _product(linear: Linear, x: Tensor, out: Tensor) -> Operation:
    if linear.packed is not None:
        product = linear.packed.operation(x.data_ptr(), _NUM_TOKENS, linear.bias, out.data_ptr())
        if product is not None:
            return product
    raise _Unsupported


def _checked(layer: nn.Module) -> DecoderLayer:
    if type(layer) is not DecoderLayer or layer.self_attn.q_norm is not None:
        raise _Unsupported
    return layer


def _checked_mlp(layer: nn.Module) -> MLP:
    if type(layer.mlp) is not MLP:
        raise _Unsupported
    return layer.mlp
