"""The parallel draft head: one pass drafts a whole block of tokens (JetSpec, arXiv 2606.18394; DFlash, 2602.06036).

The target's tapped layers at every known position but the last become keys and values of the head's own layers, each
projected once and cached. A block, the root (the last known token) and masked slots after it, attends to them and
within itself; slot i drafts the token i positions after the root (i + 1 with ``shift_labels``). The layers are Qwen3's,
so the block runs through the target's own ``forward``: what differs between drafting and training is ``attend`` alone.

A head is a pytree of arrays as ``init_head`` makes it. With a draft vocabulary it also holds "draft_ids" i32[Vd], the
target's ids in ascending order, and "lm_head" [Vd, H], the target's frozen rows (see ``with_draft_ids``). What is said
here of logits leaves out the correction that a Domino head has: that depends on the path (``jspec.heads.correction``).
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Key

from jspec.attention import tree_attention
from jspec.decode import write_rows
from jspec.heads.config import HeadConfig
from jspec.method import check_range
from jspec.models.products import product
from jspec.models.transformer import (
    Attend,
    forward,
    output_logits,
    rms_norm,
    rope,
    rope_angles,
)
from jspec.sampling import top_k
from jspec.state import KVCache
from jspec.tree import pack_bits

HeadParams = Mapping[str, Any]
HeadCache = KVCache  # keys (after rope) and values of the context, one array a layer


class DraftTable(NamedTuple):
    """The best tokens of every drafted slot, best first, ties to the lower draft index."""

    tokens: Int[Array, "B D W"]  # ids of the target
    logps: Float[Array, "B D W"]  # natural log-probabilities over the whole draft vocabulary


class ParallelHead(nnx.Module):
    """The parameters of a head, and its two passes over M rows."""

    def __init__(self, config: HeadConfig, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        hidden, ffn, head_dim = config.hidden_size, config.ffn_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads

        def weight(*shape):
            noise = jax.random.normal(rngs.params(), shape, dtype)
            return nnx.Param(noise * shape[-1] ** -0.5)

        def ones(size):
            return nnx.Param(jnp.ones((size,), dtype))

        def layer():  # as ``jspec.models.transformer.fuse`` arranges one
            return nnx.Dict(
                input_norm=ones(hidden),
                qkv=weight(kv_heads, heads // kv_heads + 2, head_dim, hidden),
                q_norm=ones(head_dim),
                k_norm=ones(head_dim),
                o=weight(hidden, heads * head_dim),
                post_norm=ones(hidden),
                gate_up=weight(2, ffn, hidden),
                down=weight(hidden, ffn),
            )

        self.config = config
        self.fc = weight(hidden, len(config.taps) * hidden)
        self.hidden_norm = ones(hidden)
        self.layers = nnx.List([layer() for _ in range(config.num_layers)])
        self.norm = ones(hidden)
        if (wanted := config.correction) is not None:
            drafted = config.draft_vocab_size or config.vocab_size
            self.correction = nnx.Dict(
                gru_in=weight(3 * wanted.gru_size, hidden),
                gru_state=weight(3 * wanted.gru_size, wanted.gru_size),
                down=weight(wanted.rank, hidden + wanted.gru_size),
                up=nnx.Param(jnp.zeros((drafted, wanted.rank), dtype)),
            )

    def context(
        self, taps: Float[Array, "M T H"], positions: Int[Array, " M"]
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Keys (after rope) and values [M, kh, hd] that the tapped states give in each layer."""
        config, eps = self.config.stack, self.config.norm_eps
        cos, sin = rope_angles(config, positions)
        x = product(self.fc[...], taps.reshape(taps.shape[0], -1).T)
        x = rms_norm(x, self.hidden_norm[...], eps)
        keys, values = [], []
        for layer in self.layers:
            k, v = jnp.moveaxis(product(layer["qkv"][:, -2:], x), 1, 0)  # [kh, hd, M] each
            k = rope(rms_norm(k, layer["k_norm"][...], eps), cos, sin)
            keys.append(k.transpose(2, 0, 1))
            values.append(v.transpose(2, 0, 1))
        return tuple(keys), tuple(values)

    def block(
        self,
        embed: Float[Array, "V H"],
        tokens: Int[Array, " M"],
        positions: Int[Array, " M"],
        attend: Attend,
    ) -> Float[Array, "H M"]:
        """States after the final norm; ``attend`` sees to the context."""
        layers = [{name: x[...] for name, x in layer.items()} for layer in self.layers]
        params = {"embed": embed, "layers": layers, "norm": self.norm[...]}
        return forward(self.config.stack, params, tokens, positions, attend).hidden


@functools.cache
def _graph(config: HeadConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: ParallelHead(config, nnx.Rngs(0))))[0]


def _module(config: HeadConfig, head: HeadParams) -> ParallelHead:
    return nnx.merge(_graph(config), trained(head))


def init_head(
    config: HeadConfig, key: Key[Array, ""], dtype: DTypeLike = jnp.float32
) -> dict[str, Any]:
    """A new head: norms of one, weights of variance 1 / inputs.

    Returns:
      "fc" [H, T * H], "hidden_norm" [H], "layers" {0: layer, ...} with each layer as
      ``jspec.models.transformer.fuse`` arranges one, and "norm" [H]; and "correction", if there is one: "gru_in"
      [3 G, H], "gru_state" [3 G, G], "down" [R, H + G] and "up" [Vd, R], zeros, so that it changes nothing yet.
    """
    return nnx.to_pure_dict(nnx.state(ParallelHead(config, nnx.Rngs(key), dtype)))


def trained(head: HeadParams) -> dict[str, Any]:
    """The head without what is not its own: draft ids and the target's rows."""
    return {name: x for name, x in head.items() if name not in ("draft_ids", "lm_head")}


def with_draft_ids(
    head: HeadParams, target_params: Mapping[str, Any], draft_ids: Int[Array | np.ndarray, " Vd"]
) -> dict[str, Any]:
    """The head restricted to some of the target's tokens: their ids, ascending, and output rows gathered once."""
    rows = target_params.get("lm_head", target_params["embed"])
    draft_ids = jnp.asarray(draft_ids, jnp.int32)
    return {**head, "draft_ids": draft_ids, "lm_head": rows[draft_ids]}


def empty_cache(
    config: HeadConfig, batch: int, capacity: int, dtype: DTypeLike = jnp.float32
) -> HeadCache:
    """A cache of ``batch`` rows that know nothing yet."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)

    def zeros():  # arrays of their own: a state is donated, and a buffer can be donated only once
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return HeadCache(zeros(), zeros(), jnp.zeros((batch,), jnp.int32))


def read_context(
    config: HeadConfig,
    head: HeadParams,
    cache: HeadCache,
    taps: Float[Array, "B K T H"],
    counts: Int[Array, " B"],
) -> HeadCache:
    """Appends the next ``counts[b]`` known tokens to each row; taps beyond that are garbage and change nothing.

    Args:
      config: static.
      head: see ``init_head``.
      cache: appended to.
      taps: the target's states of those tokens, the layers ``config.taps`` in their order.
      counts: 0..K; what does not fit the cache is dropped.
    """
    batch, rows = taps.shape[:2]
    positions = cache.length[:, None] + jnp.arange(rows)
    pairs = _module(config, head).context(
        taps.reshape(batch * rows, *taps.shape[2:]), positions.reshape(-1)
    )
    keys, values = jax.tree.map(lambda x: x.reshape(batch, rows, *x.shape[1:]), pairs)
    path = jnp.broadcast_to(jnp.arange(rows), (batch, rows))
    return write_rows(cache, keys, values, path, counts)


def draft_block(
    config: HeadConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    cache: HeadCache,
    roots: Int[Array, " B"],
    depth: int,
) -> Float[Array, "H M"]:
    """The states that draft ``depth`` tokens after each root: column ``b * depth + i - 1`` drafts row b's i-th.

    A causal head runs the slots that it needs; to a bidirectional one fewer slots than in training are another input,
    so it runs its whole block at any depth.

    Args:
      config: static.
      head: see ``init_head``.
      target_params: its "embed" [V, H] is read.
      cache: the context: all known tokens but the root.
      roots: the last known tokens.
      depth: static, 1..config.depth.

    Raises:
      ValueError: a depth beyond the block that the head was trained on.
    """
    if not 1 <= depth <= config.depth:
        raise ValueError(f"depth must be in 1..{config.depth}, as the head drafts, got {depth}")
    used = depth + config.first_slot
    batch, size = roots.shape[0], used if config.causal else config.block_size
    positions = cache.length[:, None] + jnp.arange(size)
    visible = [
        jnp.broadcast_to(
            pack_bits(jnp.asarray(_within(config, layer, size))), (batch, size, -(-size // 32))
        )
        for layer in range(config.num_layers)
    ]

    def attend(layer, q, k, v):
        q, k, v = (x.reshape(batch, size, *x.shape[1:]) for x in (q, k, v))
        out = tree_attention(
            q,
            cache.keys[layer],
            cache.values[layer],
            cache.length,
            k,
            v,
            visible[layer],
            q_positions=positions,
            window=config.windows[layer],
        )
        return out.reshape(batch * size, *out.shape[2:])

    hidden = _module(config, head).block(
        target_params["embed"],
        _block_tokens(config, roots, size),
        positions.reshape(-1),
        attend,
    )
    return _drafting(config, hidden, size, depth)


def draft_logits(
    head: HeadParams, target_params: Mapping[str, Any], hidden: Float[Array, "H M"]
) -> Float[Array, "Vd M"]:
    """Logits in fp32 over the draft vocabulary, vocabulary first."""
    return output_logits({**target_params, **head} if "lm_head" in head else target_params, hidden)


def draft_table(
    config: HeadConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    cache: HeadCache,
    roots: Int[Array, " B"],
    depth: int,
    width: int,
) -> DraftTable:
    """The ``width`` best tokens of each of ``depth`` slots after each root: one pass of the head.

    Raises:
      ValueError: a depth beyond what the head drafts, a width beyond its vocabulary.
    """
    hidden = draft_block(config, head, target_params, cache, roots, depth)
    shape = (roots.shape[0], depth, width)
    return DraftTable(*(x.reshape(shape) for x in best_drafts(head, target_params, hidden, width)))


def best_drafts(
    head: HeadParams, target_params: Mapping[str, Any], hidden: Float[Array, "H M"], width: int
) -> tuple[Int[Array, "M W"], Float[Array, "M W"]]:
    """The ``width`` best tokens of each column, and their log-probabilities: see ``DraftTable``.

    Raises:
      ValueError: a width out of range: 1 to the head's vocabulary.
    """
    logits = draft_logits(head, target_params, hidden)
    check_range("width", width, 1, logits.shape[0])
    best, tokens = top_k(logits, width)
    logps = best - jax.nn.logsumexp(logits, axis=0)[:, None]
    return head["draft_ids"][tokens] if "draft_ids" in head else tokens, logps


def block_hidden(
    config: HeadConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    taps: Float[Array, "*B S T H"],
    tokens: Int[Array, "*B S"],
    anchors: Int[Array, "*B A"],
) -> Float[Array, "H M"]:
    """What ``draft_block`` gives at many roots of known texts, for training: differentiable, without a cache.

    The context's keys and values are made once; the block of an anchor sees the positions of its text before it,
    strictly (the anchor's own taps do not exist yet when drafting), and itself.

    Args:
      config: static.
      head: see ``init_head``.
      target_params: its "embed" [V, H] is read.
      taps: the target's states; finite, also where a text is padded.
      tokens: one text, or a batch of texts: faster than a ``vmap``, since each product takes all their columns.
      anchors: positions of the roots, in any order; below 0 is padding, whose columns are finite garbage.

    Returns:
      M = B * A * depth columns; ``(b * A + a) * depth + i - 1`` drafts the token at ``anchors[b, a] + i``.
    """
    module, size, length = _module(config, head), config.block_size, tokens.shape[-1]
    tokens, anchors = tokens.reshape(-1, length), jnp.maximum(anchors, 0)
    anchors = anchors.reshape(tokens.shape[0], -1)
    at = jnp.arange(length)
    pairs = module.context(taps.reshape(-1, *taps.shape[-2:]), jnp.tile(at, tokens.shape[0]))
    keys, values = jax.tree.map(lambda x: x.reshape(*tokens.shape, *x.shape[1:]), pairs)
    positions = anchors[..., None] + jnp.arange(size)  # [B, A, n]
    before = at < anchors[..., None, None]  # [B, A, 1, S]

    def attend(layer, q, k, v):
        q, k, v = (x.reshape(*positions.shape, *x.shape[1:]) for x in (q, k, v))
        q = q.reshape(*k.shape[:4], -1, k.shape[-1]) * k.shape[-1] ** -0.5
        seen = jnp.broadcast_to(before, (*positions.shape, length))
        if (window := config.windows[layer]) is not None:
            seen = seen & (at > positions[..., None] - window)
        # Axes in the order in which a batched product leaves them: scores are not transposed.
        outer = jnp.einsum("bankgh,bskh->bkangs", q, keys[layer])
        inner = jnp.einsum("bankgh,bamkh->bkangm", q, k)
        outer = jnp.where(seen[:, None, :, :, None], outer, -jnp.inf)
        inner = jnp.where(_within(config, layer, size)[:, None], inner, -jnp.inf)
        top = lax.stop_gradient(jnp.maximum(outer.max(-1), inner.max(-1)))[..., None]
        outer, inner = jnp.exp(outer - top), jnp.exp(inner - top)
        total = outer.sum(-1) + inner.sum(-1)
        out = jnp.einsum("bkangs,bskh->bkangh", outer, values[layer])
        out = out + jnp.einsum("bkangm,bamkh->bkangh", inner, v)
        out = (out / total[..., None]).transpose(0, 2, 3, 1, 4, 5)
        return out.reshape(-1, config.num_heads, config.head_dim)

    roots = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1)
    hidden = module.block(
        target_params["embed"], _block_tokens(config, roots, size), positions.reshape(-1), attend
    )
    return _drafting(config, hidden, size, config.depth)


def _block_tokens(config, roots, size):
    """i32[B * size]: each root and the masked slots after it."""
    masked = jnp.full((roots.shape[0], size - 1), config.mask_token_id, jnp.int32)
    return jnp.concatenate([roots[:, None], masked], axis=1).reshape(-1)


def _within(config, layer, size):
    """bool[size, size]: which slots of the block a slot sees in a layer."""
    back = np.arange(size)[:, None] - np.arange(size)
    window = config.windows[layer]
    if window is not None:
        return (back >= 0) & (back < window)
    return back >= 0 if config.causal else np.ones((size, size), bool)


def _drafting(config, hidden, size, depth):
    """The columns of the slots that draft the first ``depth`` tokens after each root."""
    first = config.first_slot
    drafted = hidden.reshape(hidden.shape[0], -1, size)[:, :, first : first + depth]
    return drafted.reshape(hidden.shape[0], -1)


__all__ = [
    "DraftTable",
    "HeadCache",
    "HeadParams",
    "ParallelHead",
    "best_drafts",
    "block_hidden",
    "draft_block",
    "draft_logits",
    "draft_table",
    "empty_cache",
    "init_head",
    "read_context",
    "trained",
    "with_draft_ids",
]
