"""What a decode holds: the plan (static), and the state (arrays) that every round takes and returns.

Leaves of a state are of two kinds. Those under ``cache``, ``rows`` and ``method.rows`` have a leading axis B: a prompt
owns its slot of them. The others are shared by the batch. That split is all that refilling a slot needs to know, and
all that spreading a batch over a mesh needs: rows go to the data shards, and each shard has what is shared to itself.
"""

import dataclasses
import itertools
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.attention import Implementation
from jspec.device import cache_dtype
from jspec.mesh import DATA, MODEL, check_batch, check_heads, data_shards
from jspec.method import MAX_BUDGET, Memory, Method, MethodState, Params, check_method, check_range
from jspec.models.config import ModelConfig
from jspec.sampling import Sampling
from jspec.tree import SOURCES

CAPACITIES = tuple(256 << i for i in range(10))  # cache rows: 256 .. 131072
BUCKETS = tuple(1 << i for i in range(20))  # row counts of a verify forward
RANKS = 8  # accepted nodes are counted by their rank among siblings, up to this one


def check_buckets(buckets: tuple[int, ...]) -> None:
    """Makes sure that row counts can be buckets.

    Raises:
      ValueError: they do not ascend from 1 or above.
    """
    if any(a >= b for a, b in itertools.pairwise((0, *buckets))):
        raise ValueError(f"buckets must ascend from 1 or above, got {buckets}")


def buckets_up_to(buckets: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The buckets that at most so many rows need: the last one holds them all."""
    return (*(b for b in buckets if b < most), most)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static about a decode; hashable, so it is one argument of every jitted step.

    Attributes:
      config: the target's.
      method: who drafts.
      sampling: how the target's tokens are drawn.
      buckets: row counts of the verify forward that get compiled, ascending. Those that a batch can't need are left
        out, and one that holds everything is always there.
      attention: implementation of ``tree_attention``; None picks for the platform.
      mesh: of ``jspec.make_mesh``, where params lie on more than one device (see ``jspec.shard_params``); None: one
        device.

    Raises:
      ValueError: what is no method, a budget outside 1..512, buckets that do not ascend from 1 or above, needs that
        the target cannot serve, or a mesh that does not divide the target's heads.
    """

    config: ModelConfig
    method: Method
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    buckets: tuple[int, ...] = BUCKETS
    attention: Implementation | None = None
    mesh: Mesh | None = None

    def __post_init__(self):
        check_method(self.method)
        check_heads(self.mesh, self.config)
        check_range("budget", self.method.budget, 1, MAX_BUDGET)
        check_buckets(self.buckets)
        needs, vocab, layers = self.method.needs, self.config.vocab_size, self.config.num_layers
        if not 0 <= needs.top_k <= vocab:
            raise ValueError(f"top tokens wanted must be in 0..{vocab}, got {needs.top_k}")
        if bad := [t for t in needs.taps if not 0 <= t <= layers]:
            raise ValueError(f"taps must be in 0..{layers}, got {bad[0]}")
        if needs.lookahead:
            raise ValueError("lookahead rows are not there yet")

    @property
    def path(self) -> int:
        """Most nodes on a path: the method's depth and the root; the most tokens a round emits."""
        return self.method.needs.depth + 1

    @property
    def shards(self) -> int:
        """Parts that a batch falls into: the size of the mesh's data axis."""
        return data_shards(self.mesh)

    def row_buckets(self, batch: int) -> tuple[int, ...]:
        """The buckets in use at a batch size, of one data shard: the last one holds ``batch`` full trees."""
        return buckets_up_to(self.buckets, batch * self.method.budget)


def _array_struct(cls):
    """A frozen dataclass pytree whose fields are arrays; JAX rebuilds it with other leaves, so types go unchecked."""
    return typing.no_type_check(
        jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
    )


@_array_struct
class KVCache:
    """Keys (after rope) and values of known tokens, one array a layer; rows at or beyond ``length`` are never read."""

    keys: tuple[Float[Array, "B kh C hd"], ...]
    values: tuple[Float[Array, "B kh C hd"], ...]
    length: Int[Array, " B"]  # rows in use = known tokens - 1


@_array_struct
class Rows:
    """What is known of each row, and counts of what happened to it. P path slots, R ranks, S sources."""

    tokens: Int[Array, "B X"]  # prompt and output; X = C + 1; the first ``length + 1`` are known
    prompt: Int[Array, " B"]  # its index in the input; with seed and position it fixes a draw
    start: Int[Array, " B"]  # prompt tokens
    limit: Int[Array, " B"]  # known tokens at which the row ends
    done: Bool[Array, " B"]
    stop: Int[Array, " B"]  # state of the stop automaton
    rounds: Int[Array, " B"]
    emitted: Int[Array, " B"]  # before a stop or the limit cuts the last round
    verified: Int[Array, " B"]  # tree nodes the target ran
    by_depth: Int[Array, "B P"]  # rounds whose accepted path reached the depth
    by_rank: Int[Array, "B R"]  # accepted nodes by rank among siblings; last entry: or worse
    by_source: Int[Array, "B S"]  # accepted nodes by who proposed them
    trace: Int[Array, "B X"]  # tokens each round emitted, before the cut


@_array_struct
class DecodeState:
    """All arrays of a decode; every step takes one and returns one.

    On a mesh of D data shards, ``method.shared``, ``histogram`` and ``draft_passes`` have a leading axis D outside of
    ``each_shard``.
    """

    cache: KVCache
    rows: Rows
    method: MethodState
    key: Key[Array, ""]
    stops: Int[Array, "states V"]  # next state by state and token; ``states`` itself means stop
    histogram: Int[Array, " buckets"]  # rounds by row bucket
    draft_passes: Int[Array, ""]
    least_rows: Int[Array, ""]  # of a verify forward: 0, but to run or time a larger bucket

    @property
    def capacity(self) -> int:
        """C, cache rows a slot can hold."""
        return self.rows.tokens.shape[1] - 1

    @property
    def known(self) -> Int[Array, " B"]:
        """Known tokens of each row: prompt and output."""
        return self.cache.length + 1

    @property
    def roots(self) -> Int[Array, " B"]:
        """The last known token of each row: the next round's root."""
        return jnp.take_along_axis(self.rows.tokens, self.cache.length[:, None], axis=1)[:, 0]


def capacity_for(plan: Plan, tokens: int) -> int:
    """The smallest capacity bucket that holds texts of ``tokens`` tokens and a last round's full path.

    Or as much of them as the target's context does.

    Raises:
      ValueError: the target's context allows such a text, but no cache is that large.
    """
    need = min(tokens + plan.path, plan.config.max_positions)
    for capacity in CAPACITIES:
        if capacity >= need:
            return min(capacity, plan.config.max_positions)
    raise ValueError(f"a text of {tokens} tokens exceeds the largest cache, {CAPACITIES[-1]} rows")


def new_state(
    plan: Plan,
    params: Params,
    batch: int,
    capacity: int,
    key: Key[Array, ""],
    stops: Int[Array | np.ndarray, "states V"] | None = None,
    memory: Memory = None,
) -> DecodeState:
    """A state of ``batch`` empty slots, all done; on the plan's mesh, if it has one.

    Args:
      plan: static.
      params: as the steps take them; see ``jspec.device.cache_dtype`` for the cache's dtype.
      batch: B, of all data shards.
      capacity: cache rows a slot; see ``capacity_for``.
      key: ``jax.random.key(seed)``.
      stops: see ``jspec.stopping.stop_table``; default: the target's EOS ids.
      memory: what the method kept from earlier requests.

    Raises:
      ValueError: ``stops`` of another vocabulary, what is no key, or a mesh that does not divide the batch.
    """
    if plan.mesh is None:
        return empty_state(plan, params, batch, capacity, key, stops, memory)
    check_batch(plan.mesh, batch)
    return _spread_state(plan, (params, key, stops, memory), batch // plan.shards, capacity)


@partial(jax.jit, static_argnums=(0, 2, 3))
def _spread_state(plan, given, rows, capacity):
    def step(given):
        params, *rest = given
        return empty_state(plan, params, rows, capacity, *rest)

    return each_shard(plan.mesh, step)(given)


def empty_state(
    plan: Plan,
    params: Params,
    batch: int,
    capacity: int,
    key: Key[Array, ""],
    stops: Int[Array | np.ndarray, "states V"] | None = None,
    memory: Memory = None,
) -> DecodeState:
    """``new_state`` on one device, or in one data shard."""
    config = plan.config
    if not jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
        raise ValueError(f"key must be one of jax.random.key, got {key!r}")
    if stops is None:
        stops = np.isin(np.arange(config.vocab_size), config.eos_ids).astype(np.int32)[None]
    if stops.ndim != 2 or stops.shape[1] != config.vocab_size:
        raise ValueError(f"stops must be [states, {config.vocab_size}], got {list(stops.shape)}")
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    dtype = cache_dtype(params["target"]["embed"].dtype)

    # Every leaf is an array of its own: a state is donated, and a buffer can be donated only once.
    def empty():
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    def zeros(*width):
        return jnp.zeros((batch, *width), jnp.int32)

    rows = Rows(
        tokens=zeros(capacity + 1),
        prompt=zeros(),
        start=zeros(),
        limit=zeros(),
        done=jnp.ones((batch,), bool),
        stop=zeros(),
        rounds=zeros(),
        emitted=zeros(),
        verified=zeros(),
        by_depth=zeros(plan.path),
        by_rank=zeros(RANKS),
        by_source=zeros(len(SOURCES)),
        trace=zeros(capacity + 1),
    )
    return DecodeState(
        cache=KVCache(empty(), empty(), zeros()),
        rows=rows,
        method=plan.method.init(params, batch, capacity, memory),
        key=jnp.copy(key),
        stops=jnp.array(stops, jnp.int32),
        histogram=jnp.zeros((len(plan.row_buckets(batch)),), jnp.int32),
        draft_passes=jnp.zeros((), jnp.int32),
        least_rows=jnp.zeros((), jnp.int32),
    )


def _owned(state: DecodeState):
    return state.cache, state.rows, state.method.rows


def insert(state: DecodeState, slot: Int[Array, ""] | int, one: DecodeState) -> DecodeState:
    """Puts the row of a batch-1 state into a slot, and takes over the method's shared state from it."""

    def put(all_rows, row):
        return jax.lax.dynamic_update_slice_in_dim(all_rows, row, slot, axis=0)

    cache, rows, mine = jax.tree.map(put, _owned(state), _owned(one))
    method = MethodState(rows=mine, shared=one.method.shared)
    return dataclasses.replace(state, cache=cache, rows=rows, method=method)


ROWS = P(DATA)  # of what has a leading batch axis
STATE = DecodeState(
    cache=ROWS,
    rows=ROWS,
    method=MethodState(rows=ROWS, shared=ROWS),
    key=P(),
    stops=P(),
    histogram=ROWS,
    draft_passes=ROWS,
    least_rows=P(),
)


def each_shard(
    mesh: Mesh | None, step: Callable[..., Any], outs: Any = STATE
) -> Callable[..., Any]:
    """A step of one device, made one that every data shard of a mesh runs on its own rows; to be jitted.

    Nothing passes between data shards, so each goes its own way: in buckets of its own, with what is shared by a batch
    to itself.

    Args:
      mesh: None: the step is returned as it is.
      step: ``step(params, *args)``: of params every shard sees all (XLA splits what lies split over the model axis),
        of a ``DecodeState`` and of arrays with a leading batch axis its own rows, of scalars the value.
      outs: what it returns: ``STATE``, ``ROWS`` (arrays with a leading batch axis) or a tuple of these.
    """
    if mesh is None:
        return step

    def inside(params, *args):
        return _each_state(_stacked, step(params, *_each_state(_own, args)))

    def spec(x):
        return STATE if isinstance(x, DecodeState) else P() if jnp.ndim(x) == 0 else ROWS

    def whole(params, *args):
        specs = P(), *jax.tree.map(spec, args, is_leaf=_is_state)
        out = jax.shard_map(
            inside, mesh=mesh, in_specs=specs, out_specs=outs, axis_names={DATA}, check_vma=False
        )(params, *args)
        return _each_state(stay, out)

    def stay(state):  # where it was, so that its buffers are used again
        return jax.tree.map(jax.lax.with_sharding_constraint, state, state_shardings(mesh, state))

    return whole


def _is_state(x):
    return isinstance(x, DecodeState)


def _each_state(change, tree):
    return jax.tree.map(lambda x: change(x) if _is_state(x) else x, tree, is_leaf=_is_state)


def _own(state):
    """A shard's state as its steps know it."""
    return _change_shared(state, lambda x: x[0])


def _stacked(state):
    return _change_shared(state, lambda x: x[None])


def _change_shared(state, change):
    method = MethodState(rows=state.method.rows, shared=jax.tree.map(change, state.method.shared))
    return dataclasses.replace(
        state,
        method=method,
        histogram=change(state.histogram),
        draft_passes=change(state.draft_passes),
    )


def state_shardings(mesh: Mesh, state: DecodeState) -> DecodeState:
    """Where a state's leaves lie: rows on the data axis, heads of caches on the model axis too.

    Args:
      mesh: of ``jspec.make_mesh``.
      state: arrays, or their shapes.
    """

    def on(spec, tree):
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), tree)

    def rows(x):
        if not isinstance(x, KVCache) or any(k.shape[1] % mesh.shape[MODEL] for k in x.keys):
            return on(ROWS, x)
        heads = P(DATA, MODEL)
        return KVCache(on(heads, x.keys), on(heads, x.values), on(ROWS, x.length))

    def owned(tree):
        return jax.tree.map(rows, tree, is_leaf=lambda x: isinstance(x, KVCache))

    return dataclasses.replace(
        jax.tree.map(on, STATE, state),
        cache=owned(state.cache),
        method=MethodState(rows=owned(state.method.rows), shared=on(ROWS, state.method.shared)),
    )
