"""The draft head of EAGLE-3 (arXiv 2503.01840): a layer that drafts a token at a time from its own features.

Every known token but the first makes a pair with the token before it: its embedding, and the feature of that one, the
target's tapped states fused into one. A pair's keys and values need no attention, so the context is projected and
cached as tokens become known, always from the target's true states. A draft is a pass over the pair of the root, then
one over each level of the tree: a node's feature is what the layer gave its parent, and it attends to the context, the
root and its ancestors, whose keys and values live in the draft alone.

A head is a pytree of arrays as ``init_head`` makes it; with a draft vocabulary it also holds "draft_ids" i32[Vd], the
target's ids in ascending order (see ``with_draft_ids``).
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
from jspec.growth import Frontier
from jspec.heads import parallel
from jspec.heads.eagle_config import EagleConfig
from jspec.heads.parallel import HeadParams, trained
from jspec.models.products import product
from jspec.models.transformer import decoder_layer, embed_rows, rms_norm, rope, rope_angles
from jspec.state import KVCache
from jspec.tree import take


class EagleState(NamedTuple):
    """What a head knows of each row.

    The cache holds the pairs of all known tokens but the first, after rope at the tokens' own positions; ``feature`` is
    that of the last one (zeros before there is one).
    """

    cache: KVCache
    feature: Float[Array, "B H"]
    known: Int[Array, " B"]


class Draft(NamedTuple):
    """A draft under way: R = 1 + (levels - 1) * q rows, those of the root and of each level's frontier."""

    passes: Int[Array, ""]
    keys: Float[Array, "B R kh hd"]
    values: Float[Array, "B R kh hd"]
    seen: Int[Array, "B q W"]  # rows that the last pass's nodes attended to, packed
    features: Float[Array, "B q H"]  # that it gave


class EagleHead(nnx.Module):
    """The parameters of a head, and its passes over M rows."""

    def __init__(self, config: EagleConfig, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        hidden, ffn, head_dim = config.hidden_size, config.ffn_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads

        def weight(*shape):
            noise = jax.random.normal(rngs.params(), shape, dtype)
            return nnx.Param(noise * shape[-1] ** -0.5)

        def ones(size):
            return nnx.Param(jnp.ones((size,), dtype))

        self.config = config
        self.fc = weight(hidden, config.tap_count * hidden)
        self.layer = nnx.Dict(  # as ``jspec.models.transformer.fuse`` arranges one
            input_norm=ones(hidden),
            hidden_norm=ones(hidden),
            qkv=weight(kv_heads, heads // kv_heads + 2, head_dim, 2 * hidden),
            o=weight(hidden, heads * head_dim),
            post_norm=ones(hidden),
            gate_up=weight(2, ffn, hidden),
            down=weight(hidden, ffn),
        )
        self.norm = ones(hidden)
        if config.own_output:
            self.output = weight(config.draft_vocab_size or config.vocab_size, hidden)

    def fused(self, taps: Float[Array, "M T H"]) -> Float[Array, "H M"]:
        """The features of tapped states."""
        return product(self.fc[...], taps.reshape(taps.shape[0], -1).T)

    def _read(self, embed, tokens, features):
        """What attention reads [2H, M], and what the residual stream begins with."""
        eps = self.config.norm_eps
        normed = rms_norm(features, self.layer["hidden_norm"][...], eps)
        words = rms_norm(embed_rows(embed, tokens), self.layer["input_norm"][...], eps)
        start = normed if self.config.norm_before_residual else features
        return jnp.concatenate([words, normed]), start

    def context(
        self,
        embed: Float[Array, "V H"],
        tokens: Int[Array, " M"],
        features: Float[Array, "H M"],
        positions: Int[Array, " M"],
    ) -> tuple[Float[Array, "M kh hd"], Float[Array, "M kh hd"]]:
        """Keys (after rope) and values of pairs."""
        y, _ = self._read(embed, tokens, features)
        k, v = jnp.moveaxis(product(self.layer["qkv"][:, -2:], y), 1, 0)  # [kh, hd, M] each
        k = rope(k, *rope_angles(self.config.stack, positions))
        return k.transpose(2, 0, 1), v.transpose(2, 0, 1)

    def step(
        self,
        embed: Float[Array, "V H"],
        tokens: Int[Array, " M"],
        features: Float[Array, "H M"],
        positions: Int[Array, " M"],
        attend,
    ) -> tuple[Float[Array, "H M"], Float[Array, "M kh hd"], Float[Array, "M kh hd"]]:
        """The features after pairs, and the pairs' keys and values; ``attend(q, k, v)`` mixes rows."""
        y, x = self._read(embed, tokens, features)
        layer = {name: x[...] for name, x in self.layer.items()}
        stack = self.config.stack
        return decoder_layer(stack, layer, x, y, rope_angles(stack, positions), attend)

    def drafting(self, features: Float[Array, "H M"]) -> Float[Array, "H M"]:
        """What the output rows read."""
        return rms_norm(features, self.norm[...], self.config.norm_eps)


@functools.cache
def _graph(config: EagleConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: EagleHead(config, nnx.Rngs(0))))[0]


def _module(config: EagleConfig, head: HeadParams) -> EagleHead:
    return nnx.merge(_graph(config), trained(head))


def init_head(
    config: EagleConfig, key: Key[Array, ""], dtype: DTypeLike = jnp.float32
) -> dict[str, Any]:
    """A new head: norms of one, weights of variance 1 / inputs.

    Returns:
      "fc" [H, T * H], "layer" as ``jspec.models.transformer.fuse`` arranges one, its "qkv" reading 2H, "norm" [H], and
      with ``own_output`` "output" [Vd, H].
    """
    return nnx.to_pure_dict(nnx.state(EagleHead(config, nnx.Rngs(key), dtype)))


def with_draft_ids(
    head: HeadParams, target_params: Mapping[str, Any], draft_ids: Int[Array | np.ndarray, " Vd"]
) -> dict[str, Any]:
    """The head with the target's ids of its draft vocabulary, ascending, and their output rows where it has none."""
    if "output" in head:
        return {**head, "draft_ids": jnp.asarray(draft_ids, jnp.int32)}
    return parallel.with_draft_ids(head, target_params, draft_ids)


def best_drafts(
    head: HeadParams, target_params: Mapping[str, Any], hidden: Float[Array, "H M"], width: int
) -> tuple[Int[Array, "M W"], Float[Array, "M W"]]:
    """The ``width`` best tokens of each column, best first, and their log-probabilities over the draft vocabulary."""
    rows = {"lm_head": head["output"]} if "output" in head else {}
    return parallel.best_drafts({**head, **rows}, target_params, hidden, width)


def empty_state(
    config: EagleConfig, batch: int, capacity: int, dtype: DTypeLike = jnp.float32
) -> EagleState:
    """The state of ``batch`` rows of which nothing is known yet."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    # Arrays of their own: a state is donated, and a buffer can be donated only once.
    stored = [(jnp.zeros(shape, dtype),) for _ in range(2)]
    lengths = [jnp.zeros((batch,), jnp.int32) for _ in range(2)]
    feature = jnp.zeros((batch, config.hidden_size), jnp.float32)
    return EagleState(KVCache(*stored, lengths[0]), feature, lengths[1])


def read_known(
    config: EagleConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    state: EagleState,
    tokens: Int[Array, "B K"],
    taps: Float[Array, "B K T H"],
    counts: Int[Array, " B"],
) -> EagleState:
    """Takes in the next ``counts[b]`` known tokens of each row; what stands beyond that is garbage and changes nothing.

    Args:
      config: static.
      head: see ``init_head``.
      target_params: its "embed" [V, H] is read.
      state: before.
      tokens: the tokens.
      taps: the target's states of those tokens, the layers ``config.taps`` in their order.
      counts: 0..K; what does not fit the cache is dropped.
    """
    module = _module(config, head)
    batch, rows = tokens.shape
    features = module.fused(taps.reshape(batch * rows, *taps.shape[2:]))
    features = features.reshape(-1, batch, rows)
    before = jnp.concatenate([state.feature.T[:, :, None], features[:, :, :-1]], axis=2)
    positions = state.known[:, None] + jnp.arange(rows)
    flat = (tokens.reshape(-1), before.reshape(-1, batch * rows), positions.reshape(-1))
    pairs = module.context(target_params["embed"], *flat)
    keys, values = (x.reshape(batch, rows, *x.shape[1:]) for x in pairs)
    first = (state.known == 0).astype(jnp.int32)  # the first token of all makes no pair
    path = jnp.minimum(jnp.arange(rows) + first[:, None], rows - 1)
    cache = write_rows(state.cache, (keys,), (values,), path, jnp.maximum(counts - first, 0))
    last = features[:, jnp.arange(batch), jnp.maximum(counts - 1, 0)].T
    feature = jnp.where(counts[:, None] > 0, last, state.feature)
    return EagleState(cache, feature, state.known + counts)


def begin_draft(state: EagleState, levels: int, width: int) -> Draft:
    """A draft of so many levels, with frontiers of ``width`` nodes."""
    batch, kv_heads, _, head_dim = state.cache.keys[0].shape
    rows = 1 + (levels - 1) * width
    stored = jnp.zeros((batch, rows, kv_heads, head_dim), state.cache.keys[0].dtype)
    seen = jnp.zeros((batch, width, -(-rows // 32)), jnp.int32)
    features = jnp.zeros((batch, width, state.feature.shape[1]), jnp.float32)
    return Draft(jnp.zeros((), jnp.int32), stored, stored, seen, features)


def draft_level(
    config: EagleConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    state: EagleState,
    children: int,
    draft: Draft,
    frontier: Frontier,
) -> tuple[tuple[Int[Array, "B q W"], Float[Array, "B q W"]], Draft]:
    """One pass: the candidates under the nodes of a frontier. With all but the last two it is ``grow``'s ``expand``.

    Args:
      config: static.
      head: see ``init_head``.
      target_params: its "embed" [V, H] is read, and its output rows where the head has none.
      state: of all known tokens but the root.
      children: W, the best tokens of each node.
      draft: the levels before.
      frontier: the first one is the root, in slot 0.
    """
    module, width = _module(config, head), frontier.tokens.shape[1]

    def run(nodes, features, before, start):
        """A pass over the first ``nodes`` slots, whose rows begin at ``start``."""
        tokens, depths = frontier.tokens[:, :nodes], frontier.depths[:, :nodes]
        batch = tokens.shape[0]
        row = start + jnp.arange(nodes)
        word = jnp.arange(before.shape[2])
        own = jnp.where(word == row[:, None] // 32, jnp.int32(1) << (row[:, None] % 32), 0)
        seen = before | own

        def put(stored, new):
            new = new.reshape(batch, nodes, *new.shape[1:]).astype(stored.dtype)
            return lax.dynamic_update_slice_in_dim(stored, new, start, axis=1)

        def attend(q, k, v):
            q = q.reshape(batch, nodes, *q.shape[1:])
            context = (state.cache.keys[0], state.cache.values[0], state.cache.length)
            out = tree_attention(q, *context, put(draft.keys, k), put(draft.values, v), seen)
            return out.reshape(batch * nodes, *out.shape[2:])

        positions = (state.known[:, None] + depths).reshape(-1)
        flat = features.reshape(batch * nodes, -1).T
        out, k, v = module.step(target_params["embed"], tokens.reshape(-1), flat, positions, attend)
        best = best_drafts(head, target_params, module.drafting(out), children)
        found = [x.reshape(batch, nodes, children) for x in best]
        grown = Draft(
            draft.passes + 1,
            put(draft.keys, k),
            put(draft.values, v),
            seen,
            out.T.reshape(batch, nodes, -1),
        )
        return found, grown

    def root():
        (tokens, logps), grown = run(1, state.feature[:, None], draft.seen[:, :1], 0)

        def pad(x, fill):
            return jnp.pad(x, [(0, 0), (0, width - 1), (0, 0)], constant_values=fill)

        seen, features = pad(grown.seen, 0), pad(grown.features, 0.0)
        return (pad(tokens, 0), pad(logps, -jnp.inf)), grown._replace(seen=seen, features=features)

    def level():
        slots = frontier.slots[:, :, None]
        start = 1 + (draft.passes - 1) * width
        found, grown = run(width, take(draft.features, slots), take(draft.seen, slots), start)
        return tuple(found), grown

    return lax.cond(draft.passes == 0, root, level)


def block_hidden(
    config: EagleConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    taps: Float[Array, "*B S T H"],
    tokens: Int[Array, "*B S"],
    anchors: Int[Array, "*B A"],
) -> Float[Array, "H M"]:
    """The training-time test at many roots of known texts: what drafting their true continuations would give.

    ``config.steps`` passes are unrolled. Each is fed the text's next token and the feature of the pass before at the
    same anchor. It attends to the pairs of all tokens up to the anchor, and to that anchor's own later pairs: their
    keys are appended, the causal mask of the first pass is never shifted (EAGLE's pull request 299). Differentiable
    through all passes.

    Args:
      config: static.
      head: see ``init_head``.
      target_params: its "embed" [V, H] is read.
      taps: the target's states; finite, also where a text is padded.
      tokens: one text, or a batch of texts.
      anchors: positions of the roots, in any order; below 0 is padding, whose columns are finite garbage.

    Returns:
      M = B * A * steps columns; ``(b * A + a) * steps + i - 1`` drafts the token at ``anchors[b, a] + i`` of text b.
    """
    module, length = _module(config, head), tokens.shape[-1]
    tokens = tokens.reshape(-1, length)
    batch, embed = tokens.shape[0], target_params["embed"]
    anchors = jnp.maximum(anchors, 0).reshape(batch, -1)
    features = module.fused(taps.reshape(-1, *taps.shape[-2:])).reshape(-1, batch, length)
    features = jnp.pad(features[:, :, :-1], [(0, 0), (0, 0), (1, 0)])  # of the token before
    at = jnp.arange(length)
    flat = (tokens.reshape(-1), features.reshape(-1, batch * length), jnp.tile(at, batch))
    pairs = module.context(embed, *flat)
    keys, values = (x.reshape(batch, length, *x.shape[1:]) for x in pairs)
    here = anchors[..., None]
    known = (at <= here) & ((at > 0) | (here == 0))  # [B, A, S]
    later_keys, later_values, drafted = [], [], []

    def attend(q, k, v):
        shape = *anchors.shape, *k.shape[1:]
        q = q.reshape(*shape[:3], -1, shape[3]) * shape[3] ** -0.5
        context = jnp.einsum("bakgh,bskh->bkags", q, keys)
        scores = [jnp.where(known[:, None, :, None], context, -jnp.inf)]
        if drafted:  # the pair of the anchor itself is in the context
            later_keys.append(k.reshape(shape))
            later_values.append(v.reshape(shape))
            own = jnp.stack(later_keys, axis=2)
            scores.append(jnp.einsum("bakgh,bajkh->bkagj", q, own))
        chance = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        out = jnp.einsum("bkags,bskh->bakgh", chance[..., :length], values)
        if drafted:
            own = jnp.stack(later_values, axis=2)
            out = out + jnp.einsum("bkagj,bajkh->bakgh", chance[..., length:], own)
        return out.reshape(-1, config.num_heads, config.head_dim)

    out = features[:, jnp.arange(batch)[:, None], anchors].reshape(config.hidden_size, -1)
    for step in range(config.steps):
        places = anchors + step
        word = jnp.take_along_axis(tokens, jnp.minimum(places, length - 1), axis=1)
        out, _, _ = module.step(embed, word.reshape(-1), out, places.reshape(-1), attend)
        drafted.append(module.drafting(out))
    return jnp.stack(drafted, axis=-1).reshape(config.hidden_size, -1)


__all__ = [
    "Draft",
    "EagleHead",
    "EagleState",
    "begin_draft",
    "best_drafts",
    "block_hidden",
    "draft_level",
    "empty_state",
    "init_head",
    "read_known",
    "trained",
    "with_draft_ids",
]
