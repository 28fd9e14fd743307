"""How the target's next token is drawn: filters, and noise keyed by position.

Logits stand as ``[V, M]``, vocabulary first and one column a row of the forward: that is how ``W[out, in] @ x`` leaves
them, and transposing them costs more than everything done here (XLA:CPU, V = 49152).

The draw is Gumbel-argmax, so it is a function of (seed, prompt, position) alone: the same token is drawn at the same
place of the same text whether it is reached by a tree, by a batch or one token at a time.
"""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jspec.mesh import in_blocks

_BLOCK = 256  # vocabulary rows a block of the two-level top-k
_LEAST = 1e-6  # temperature and top_p, so that fp32 holds what is made of them
_PREFIX = 64  # top-p: candidates looked at before falling back to a search over all


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature and filters, applied in the order temperature, top-k, top-p, min-p.

    Attributes:
      temperature: 0 is greedy decoding; then the filters do nothing.
      top_k: keep the k most likely tokens, and those as likely as the k-th (0: all).
      top_p: keep every token whose more likely tokens hold less than ``top_p`` of the mass; in (0, 1].
      min_p: keep tokens at least ``min_p`` times as likely as the most likely one; in [0, 1].

    Raises:
      ValueError: for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, numbers.Real) or isinstance(value, bool):
                raise ValueError(f"{field.name} must be a number, got {value!r}")
        if self.temperature != 0 and not _LEAST <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or at least {_LEAST}, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or above, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_p < _LEAST:
            raise ValueError(f"top_p must be at least {_LEAST}, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the draw needs no noise."""
        return self.temperature == 0


def top_k(logits: Float[Array, "V M"], k: int) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """The k largest entries of every column, ties to the lower index, in two levels.

    The k blocks with the largest maxima hold the k largest entries (a block left out has k blocks before it that each
    hold an entry as good and, where equal, of lower index), so only those are searched.

    Raises:
      ValueError: k above V.
    """
    vocab, rows = logits.shape
    if k > vocab:
        raise ValueError(f"k must be at most the vocabulary's {vocab}, got {k}")
    logits = in_blocks(logits, _BLOCK)
    if vocab % _BLOCK:
        logits = jnp.pad(logits, ((0, -vocab % _BLOCK), (0, 0)), constant_values=-jnp.inf)
    blocks = logits.reshape(-1, _BLOCK, rows)
    if k >= blocks.shape[0]:
        values, tokens = jax.lax.top_k(logits.T, k)
        return values, jnp.minimum(tokens, vocab - 1)
    _, best = jax.lax.top_k(blocks.max(axis=1).T, k)  # [M, k]
    best = jnp.sort(best, axis=1)  # in index order, so that ties go to the lower index
    inside = blocks[best[:, :, None], jnp.arange(_BLOCK), jnp.arange(rows)[:, None, None]]
    values, at = jax.lax.top_k(inside.reshape(rows, k * _BLOCK), k)
    tokens = jnp.take_along_axis(best, at // _BLOCK, axis=1) * _BLOCK + at % _BLOCK
    return values, jnp.minimum(
        tokens, vocab - 1
    )  # NaNs, of a damaged model, may sort below the padding


def _top_p_cut(probs: Float[Array, "V M"], top_p: float) -> Float[Array, " M"]:
    """The smallest probability that top-p keeps: the least t with ``sum(probs > t) < top_p``, without a sort."""
    best, _ = top_k(probs, min(_PREFIX, probs.shape[0]))
    kept = jnp.cumsum(best, axis=1) - best < top_p
    cut = jnp.where(kept, best, jnp.inf).min(axis=1)

    def search(_):
        # Positive floats order as their bit patterns do: 31 halvings find the exact value.
        def halve(_, bounds):
            low, high = bounds
            middle = low + (high - low) // 2
            value = jax.lax.bitcast_convert_type(middle, jnp.float32)
            enough = jnp.where(probs > value, probs, 0).sum(axis=0) >= top_p
            return jnp.where(enough, middle + 1, low), jnp.where(enough, high, middle)

        one = jnp.full(cut.shape, jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32))
        low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(one), one))
        return jax.lax.bitcast_convert_type(low, jnp.float32)

    return jax.lax.cond(kept[:, -1].any(), search, lambda _: cut, None)


def warp(sampling: Sampling, logits: Float[Array, "V M"]) -> Float[Array, "V M"]:
    """Logits after temperature and filters; filtered tokens are -inf. Greedy: the logits themselves."""
    if sampling.greedy:
        return logits
    logits = logits.astype(jnp.float32) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[0]:
        kth = top_k(logits, sampling.top_k)[0][:, -1]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if sampling.top_p < 1:
        probs = jax.nn.softmax(logits, axis=0)
        logits = jnp.where(probs >= _top_p_cut(probs, sampling.top_p), logits, -jnp.inf)
    if sampling.min_p > 0:
        floor = logits.max(axis=0) + jnp.log(sampling.min_p)
        logits = jnp.where(logits >= floor, logits, -jnp.inf)
    return logits


def position_noise(
    key: Key[Array, ""], prompts: Int[Array, " B"], positions: Int[Array, "B P"], vocab: int
) -> Float[Array, "B P V"]:
    """Gumbel noise for the token at each position of each prompt.

    Args:
      key: ``jax.random.key(seed)``.
      prompts: index of each row's prompt in the input, whatever slot it runs in.
      positions: index, in the row's text, of the token to be drawn.
      vocab: V.
    """

    def one(prompt, position):
        return jax.random.gumbel(
            jax.random.fold_in(jax.random.fold_in(key, prompt), position), (vocab,)
        )

    return jax.vmap(jax.vmap(one, (None, 0)))(prompts, positions)


def draw(
    sampling: Sampling, logits: Float[Array, "V M"], noise: Float[Array, "V M"] | None
) -> Int[Array, " M"]:
    """One token a column: the argmax of warped logits plus noise (none when greedy), ties to the lower index."""
    scores = warp(sampling, logits)
    if not sampling.greedy:
        scores = scores + noise
    return top_k(scores, 1)[1][:, 0]
