"""The decoder: RMSNorm, rotary grouped-query attention and SwiGLU, pre-norm, as Llama, Qwen2 and Qwen3 have it.

Shapes: B samples, T positions, H hidden, V vocabulary, Q query heads, K KV heads, D head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.rl.model.cache import KVCache
from runtime.rl.model.config import SCALE_LOGITS_KEY, DecoderConfig
from runtime.rl.model.packed import LayerPass, PackedPass, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B,Q,T,D], k [B,K,T,D], v [B,K,T,D]) -> [B,Q,T,D]."""


class Linear(nn.Module):
    """As torch's, without an initialisation of its own: it would draw global noise, and skipping it imports the compiler."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A row a token."""

    def __init__(self, vocab: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, size, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension, then by a learnt weight."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections, optional per-head norms, rotation; how positions see each other is the caller's `attend`."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, query, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(config.hidden, kv, bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Linear(config.hidden, kv, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(query, config.hidden, bias=config.out_bias, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, dtype=dtype) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, dtype=dtype) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        mixed = attend(self.layer, q, k, v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.intermediate, bias=False, dtype=dtype)
        self.up_proj = Linear(config.hidden, config.intermediate, bias=False, dtype=dtype)
        self.down_proj = Linear(config.intermediate, config.hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each on a normed input and added to the residual."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend | LayerPass) -> Tensor:
        if isinstance(attend, LayerPass):
            return attend.through(self, x, cos, sin)
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Everything below the output embedding; named `model` in the parameters' names."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab, config.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, i, dtype) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps, dtype=dtype)


class Decoder(nn.Module):
    """A causal language model. Parameters are uninitialised until `build_seeded` or `load_pretrained` fills them."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, dtype)
        if not config.tied:
            self.lm_head = Linear(config.hidden, config.vocab, bias=False, dtype=dtype)
        # Not a buffer: a cast of the module to bfloat16 must not round the frequencies. Made at first use, where used.
        self._frequencies: Tensor | None = None

    def forward(self, tokens: Tensor, positions: Tensor | None = None, packed: PackedPass | None = None) -> Any:
        """Logits [B,T,V] of right-padded tokens [B,T]: causal, so padding never reaches the positions before it.

        `positions` [B,T] default to 0..T-1. With `packed`, tokens [T] are those of its row and the result is that of its
        head: everything that needs parameters happens in here, where a sharded module has them whole.
        """
        if packed is not None:
            hidden = self._run_packed(tokens, packed)
            return packed.head(hidden, self._head_weight, self.config.logit_scale)
        return self.head(self.hidden_states(tokens, positions))

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Final normed states [B,T,H]; pass only the wanted positions on to `head` to spare memory with large V."""
        return self._run(tokens, positions, _causal)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [...,V] of states [...,H], scaled as the config says."""
        logits = F.linear(hidden, self._head_weight)
        return logits * self.config.logit_scale if self.config.scale_logits else logits

    @property
    def _head_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight

    def prefill(self, tokens: Tensor, cache: KVCache, first_row: int) -> None:
        """Fill cache rows `first_row`.. with the keys and values of right-padded tokens [B,T].

        Positions after a row's length hold padding; `decode` overwrites each before it is seen.
        """

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write_prefix(layer, first_row, k, v)
            return _causal(layer, q, k, v)

        self._run(tokens, None, attend)

    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Logits [R,V] after one token [R] at `positions` [R] of cache rows 0..R-1, which must hold all before it."""
        rows, length = tokens.shape[0], int(positions.max()) + 1
        index = torch.arange(rows, device=tokens.device)
        seen = (torch.arange(length, device=tokens.device) <= positions[:, None])[:, None, None, :]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.k[layer], cache.v[layer]
            keys[index, :, positions] = k[:, :, 0]
            values[index, :, positions] = v[:, :, 0]
            return F.scaled_dot_product_attention(
                q, keys[:rows, :, :length], values[:rows, :, :length], attn_mask=seen, enable_gqa=True
            )

        return self.head(self._run(tokens[:, None], positions[:, None], attend)[:, 0])

    def _run(self, tokens: Tensor, positions: Tensor | None, attend: Attend) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.model.embed_tokens(tokens)
        cos, sin = self._rotation(positions, x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        out: Tensor = self.model.norm(x)
        return out

    def _run_packed(self, tokens: Tensor, packed: PackedPass) -> Tensor:
        """Final normed states [N,H] of the wanted places."""
        x = self.model.embed_tokens(tokens)
        cos, sin = (a[0, 0, :, None] for a in self._rotation(packed.row.positions[None], x.dtype))
        mix = packed.attention.prepare(packed.row)
        ways = {again: LayerPass(mix=mix, halves=packed.halves, recompute=again) for again in (False, True)}
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, ways[i < packed.recomputed])
        out: Tensor = self.model.norm(x.index_select(0, packed.wanted))
        return out

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B,1,T,D/2] of the angles at positions [B,T], computed in float64, then rounded."""
        frequencies = self._frequencies
        if frequencies is None or frequencies.device != positions.device:
            values = self.config.inverse_frequencies()
            frequencies = self._frequencies = torch.tensor(values, dtype=torch.float64, device=positions.device)
        angles = (positions.to(torch.float64)[..., None] * frequencies)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @torch.no_grad()
    def export_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(config.json, tensors) of a plain Hugging Face model equal in function.

        A logit scale is folded into the output embedding, which a tied model then no longer shares.
        """
        state = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        config = self.config.to_hf(dtype=str(self.model.norm.weight.dtype).removeprefix("torch."))
        if self.config.scale_logits:
            head = self._head_weight
            state["lm_head.weight"] = (head.detach().double() * self.config.logit_scale).to(head.dtype)
            config = {k: v for k, v in config.items() if k != SCALE_LOGITS_KEY} | {"tie_word_embeddings": False}
        return config, state


def _causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    del layer
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
