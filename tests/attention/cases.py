"""What the tests of all implementations of tree attention share: inputs, garbage and a reference in float64."""

import numpy as np

from tests import oracles

WILD = np.nan, np.inf, -np.inf, 1e30, -1e30
HUGE = 1e30, -1e30


def dense(q, k_ctx, v_ctx, length, k_new, v_new, seen, positions=None, window=None, scale=None):
    """One query and one head at a time, over exactly the rows it sees."""
    q, k_ctx, v_ctx, k_new, v_new = (
        np.asarray(x, np.float64) for x in (q, k_ctx, v_ctx, k_new, v_new)
    )
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    out = np.zeros_like(q)
    for b, i, h in np.ndindex(out.shape[:3]):
        group = h // (q.shape[2] // k_ctx.shape[1])
        first = 0 if window is None else max(0, positions[b, i] - window + 1)
        past, fresh = slice(first, length[b]), seen[b, i]
        keys = np.concatenate([k_ctx[b, group, past], k_new[b, fresh, group]])
        values = np.concatenate([v_ctx[b, group, past], v_new[b, fresh, group]])
        if len(keys):
            scores = keys @ q[b, i, h] * scale
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights @ values / weights.sum()
    return out


def poison(rng, inputs, seen, stale_values=HUGE):
    """The inputs with garbage beyond the lengths, and in new rows that no query sees."""
    q, k_ctx, v_ctx, length, k_new, v_new = inputs
    stale = np.arange(k_ctx.shape[2]) >= length[:, None]
    stale = np.broadcast_to(stale[:, None], k_ctx.shape[:3])
    unseen = ~seen.any(axis=1)

    def spoil(x, where, garbage):
        x = x.copy()
        x[where] = rng.choice(np.array(garbage, x.dtype), x[where].shape)
        return x

    return (
        q,
        spoil(k_ctx, stale, WILD),
        spoil(v_ctx, stale, stale_values),
        length,
        spoil(k_new, unseen, WILD),
        spoil(v_new, unseen, HUGE),
    )


def random_visibility(rng, batch, queries, rows):
    """bool[B, Q, M]: sparse, dense, and some rows and columns with nothing at all."""
    seen = rng.random((batch, queries, rows)) < rng.choice([0.1, 0.5, 1.0], (batch, queries, 1))
    seen &= rng.random((batch, queries, 1)) < 0.8
    return seen & (rng.random((batch, 1, rows)) < 0.8)


class Case:
    """Random inputs of one call: trees where there are as many new rows as queries."""

    def __init__(
        self,
        queries,
        rows,
        heads,
        kv_heads,
        head_dim,
        capacity,
        lengths,
        dtype=np.float32,
        window=None,
    ):
        rng, batch = np.random.default_rng(queries + rows), len(lengths)

        def normal(*shape):
            return rng.normal(size=(batch, *shape)).astype(dtype)

        cached, fresh = (kv_heads, capacity, head_dim), (rows, kv_heads, head_dim)
        lengths = np.array(lengths, np.int32)
        self.inputs = (
            normal(queries, heads, head_dim),
            normal(*cached),
            normal(*cached),
            lengths,
            normal(*fresh),
            normal(*fresh),
        )
        self.seen = random_visibility(rng, batch, queries, rows)
        if queries == rows:
            trees = oracles.random_rows(rng, batch + 1, rows)[
                1:
            ]  # one of a single node, then full ones
            self.seen = np.array([oracles.ancestors(tree, rows) for tree in trees])
        self.window, self.positions = window, None
        if window is not None:
            self.positions = lengths[:, None] + rng.integers(0, 6, (batch, queries), np.int32)

    def spoiled(self, stale_values=HUGE):
        """See ``poison``."""
        return poison(np.random.default_rng(1), self.inputs, self.seen, stale_values)

    def reference(self):
        """See ``dense``."""
        return dense(*self.inputs, self.seen, self.positions, self.window)
