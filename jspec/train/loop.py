"""The training of a draft head: steps, held-out acceptance, checkpoints.

A run is a function of its configs: each step's batch follows from its number, evaluations and checkpoints fall on fixed
steps, and a run that was killed goes on from its last checkpoint to the same end.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jspec.checkpoint import readable
from jspec.files import check_writable
from jspec.heads.config import HeadError
from jspec.heads.correction import taught_inputs
from jspec.heads.kinds import AnyConfig, code_of
from jspec.mesh import DATA, check_batch, check_heads, param_shardings, shard_params
from jspec.models.config import ModelConfig
from jspec.models.load import Target
from jspec.state import Plan
from jspec.train.data import Batch, BatchConfig, Batches, Text
from jspec.train.evaluation import evaluate, held_out_recordings, long_enough
from jspec.train.features import target_taps, with_taps
from jspec.train.interrupts import put_off
from jspec.train.log import add_row, forget_after
from jspec.train.losses import Corrected, LossConfig, base_share, block_loss
from jspec.train.optim import OptimConfig, optimizer

SCALED_ON = 16  # texts whose taps set the scale of a new head's fusion


class TrainState(NamedTuple):
    """What a checkpoint holds."""

    head: dict[str, Any]
    optimizer: optax.OptState
    step: Int[Array, ""]
    best: Array  # held-out acceptance length of the best checkpoint so far


class Frozen(NamedTuple):
    """What a step reads and does not change: the target's weights, and the output rows of the draft vocabulary."""

    target: dict[str, Any]
    output: Array
    draft_of: Int[Array, " V"]  # draft id of each target id; -1: none


def frozen_parts(target: Target, draft_ids: Int[np.ndarray, " Vd"] | None) -> Frozen:
    """The parts of a target that training reads."""
    rows = target.params.get("lm_head", target.params["embed"])
    if draft_ids is None:
        return Frozen(target.params, rows, jnp.arange(target.config.vocab_size))
    draft_of = np.full(target.config.vocab_size, -1, np.int32)
    draft_of[draft_ids] = np.arange(len(draft_ids))
    return Frozen(target.params, rows[draft_ids], jnp.asarray(draft_of))


def first_head(
    config: AnyConfig,
    texts: Sequence[Text],
    taps: Sequence[int],
    rows: Float[Array, "V H"],
    seed: int,
) -> dict:
    """New weights, the fusion's scaled so that every tap counts alike; output rows of its own begin as the target's.

    The residual stream grows tenfold from the first layers to the last; without this the last tap would drown the
    others. The median is of some texts' tokens, since a first token's states can be a thousand times the others'.
    """
    head = code_of(config).init_head(config, jax.random.key(seed))
    if "output" in head:
        head = head | {"output": jnp.array(rows, jnp.float32)}
    columns = [taps.index(tap) for tap in config.taps]
    seen = np.concatenate([np.asarray(t.taps[:, columns], np.float32) for t in texts])
    sizes = np.median(np.sqrt(np.square(seen).mean(axis=-1)), axis=0)  # [T]
    scale = np.repeat(1 / np.maximum(sizes, 1e-6), config.hidden_size)
    return head | {"fc": head["fc"] * scale.astype(np.float32)}


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 8), donate_argnums=5)
def train_step(
    target: ModelConfig,
    head_config: AnyConfig,
    loss: LossConfig,
    optim: OptimConfig,
    taps: tuple[int, ...],
    state: TrainState,
    frozen: Frozen,
    batch: Batch,
    mesh: Mesh | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One step. Donates ``state``.

    Args:
      target: static: the target's.
      head_config: static.
      loss: static.
      optim: static.
      taps: static: which layers ``batch.taps`` holds; (): none, they are made here.
      state: before.
      frozen: see ``frozen_parts``.
      batch: see ``Batches``.
      mesh: static: its data shards have a part of the texts each, and add up their gradients; None: one device.
    """
    if mesh is None:
        return _step(target, head_config, loss, optim, taps, state, frozen, batch)

    def total(x):
        return jax.tree.map(lambda y: lax.psum(y, DATA), x)

    def part(state, frozen, batch):
        return _step(target, head_config, loss, optim, taps, state, frozen, batch, total)

    specs = P(), P(), P(DATA)
    spread = jax.shard_map(
        part, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={DATA}, check_vma=False
    )
    after, said = spread(state, frozen, batch)
    where = param_shardings(mesh, after)
    return jax.tree.map(lax.with_sharding_constraint, after, where), said


def _step(target, head_config, loss, optim, taps, state, frozen, batch, total=lambda x: x):
    if taps:
        states = batch.taps
    else:
        taps = (*head_config.taps, target.num_layers)
        states = target_taps(target, frozen.target, batch.tokens, taps)
    columns = np.asarray([taps.index(tap) for tap in head_config.taps])
    labels = jnp.where(batch.labels >= 0, frozen.draft_of[jnp.maximum(batch.labels, 0)], -1)
    depth, hidden_size = head_config.depth, head_config.hidden_size
    teacher = None
    if loss.kind != "ce":
        at = jnp.maximum(batch.anchors, 0)[..., None] + jnp.arange(depth)
        at = jnp.minimum(at, batch.tokens.shape[1] - 1).reshape(batch.tokens.shape[0], -1)
        final = states[:, :, taps.index(target.num_layers)]
        teacher = jnp.take_along_axis(final, at[..., None], axis=1)
        teacher = teacher.reshape(-1, hidden_size).T.astype(jnp.float32)

    def objective(head):
        # Products take the target's dtype; what is trained, and the moments, stay in fp32.
        narrow = jax.tree.map(lambda x: x.astype(frozen.output.dtype) if x.ndim > 1 else x, head)
        hidden = code_of(head_config).block_hidden(
            head_config,
            narrow,
            frozen.target,
            states[:, :, columns],
            batch.tokens,
            batch.anchors,
        )
        kinds = {"teacher_output": frozen.output, "train_output": "output" in narrow}
        if head_config.correction is not None:
            roots = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.anchors, 0), axis=1)
            path = roots.reshape(-1), batch.labels.reshape(-1, depth)
            inputs = taught_inputs(head_config, narrow, frozen.target, hidden, *path)
            share = base_share(loss, state.step, optim.steps)
            kinds["corrected"] = Corrected(narrow["correction"]["up"], inputs, share)
        output, flat = narrow.get("output", frozen.output), labels.reshape(-1, depth)
        return block_loss(loss, output, hidden, flat, teacher, total=total, **kinds)

    (value, said), gradient = total(jax.value_and_grad(objective, has_aux=True)(state.head))
    change, moments = optimizer(optim).update(gradient, state.optimizer, state.head)
    head = optax.apply_updates(state.head, change)
    said = said | {"loss": value, "gradient": optax.tree.norm(gradient)}
    return TrainState(head, moments, state.step + 1, state.best), said


class Trainer:
    """A run in a folder: ``last`` and ``best`` (orbax checkpoints), ``log.jsonl``.

    Attributes:
      state: as it is now.
      config: the head's.
      first_weights: ``first_weights()`` gives the weights that the run began with.
    """

    def __init__(
        self,
        target: Target,
        head_config: AnyConfig,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        taps: tuple[int, ...],
        plans: dict[str, Plan],
        folder: Path,
        *,
        batch: BatchConfig,
        loss: LossConfig,
        optim: OptimConfig,
        draft_ids: Int[np.ndarray, " Vd"] | None = None,
        as_params: Callable[[dict], dict] = lambda head: head,
        init: dict[str, Any] | None = None,
        resume: bool = True,
    ):
        """Reads the last checkpoint, if there is one.

        Args:
          target: what the head drafts for; a run is on its mesh, whichever one its checkpoints are from.
          head_config: the head's.
          texts: that are trained on.
          held_out: others, of the same library.
          taps: of the library.
          plans: what is evaluated, by name; the first one says which checkpoint is the best.
          folder: of the run.
          batch: see ``BatchConfig``.
          loss: see ``LossConfig``.
          optim: see ``OptimConfig``.
          draft_ids: the draft vocabulary; None: all tokens.
          as_params: makes of trained weights what ``params["head"]`` is when decoding.
          init: trained weights to begin with; None: new ones.
          resume: False leaves the last checkpoint alone: only ``best_state`` is asked for.

        Raises:
          ValueError: no held-out text that is long enough, taps that are missing, or a mesh that does not divide the
            texts of a step or the head's heads.
          OSError: ``last`` or ``best`` is there and no folder that can be written.
        """
        self.config, self.loss, self.optim, self.taps = head_config, loss, optim, taps
        self.target, self.mesh = target.config, target.mesh
        check_batch(self.mesh, batch.texts, "batch.texts")
        check_heads(self.mesh, head_config, "the head's")
        if taps and loss.kind != "ce" and target.config.num_layers not in taps:
            raise ValueError(
                f"a {loss.kind} loss needs the target's final states kept: --teacher true"
            )
        if taps and (missing := set(head_config.taps) - set(taps)):
            raise ValueError(f"the library does not keep tap {min(missing)}, which the head reads")
        self.batches = Batches(texts, batch, head_config.depth)
        self.texts = len(texts)
        self.response_tokens = sum(len(text.tokens) - text.start for text in texts)
        there = taps or head_config.taps
        sample, held = (
            with_taps(target.config, target.params, some, there)
            for some in (texts[:SCALED_ON], long_enough(held_out, head_config, optim))
        )
        self.recordings = held_out_recordings(held, there, head_config, optim)
        self.frozen = shard_params(self.mesh, frozen_parts(target, draft_ids))
        self.plans, self.folder, self.as_params = plans, folder, as_params
        self._goes_on = init is not None
        folder.mkdir(parents=True, exist_ok=True)
        if init is None:
            given = (sample, there, self.frozen.output, optim.seed)
            self.first_weights = partial(first_head, head_config, *given)
        else:
            self.first_weights = partial(jax.tree.map, partial(jnp.array, dtype=jnp.float32), init)
        head = self.first_weights()
        begin = TrainState(head, optimizer(optim).init(head), jnp.int32(0), jnp.float32(0))
        self.state = shard_params(self.mesh, begin)
        # What fails in a thread of orbax's is told in tracebacks, and may keep the process from its end.
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._last = ocp.CheckpointManager((folder / "last").absolute(), options=options)
        self._best = ocp.CheckpointManager((folder / "best").absolute(), options=options)
        if not resume:
            return
        for manager in (self._last, self._best):
            check_writable(Path(manager.directory))
        if (step := self._last.latest_step()) is not None:
            self.state = self._restore(self._last, step)

    def _restore(self, manager: ocp.CheckpointManager, step: int) -> TrainState:
        shape = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        with readable(Path(manager.directory) / str(step)):
            return manager.restore(step, args=ocp.args.StandardRestore(shape))

    def run(
        self,
        until: int | None = None,
        say: Callable[[dict], None] = lambda row: None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Trains to the end, or to a step.

        Args:
          until: a multiple of ``eval_every``, or the last step.
          say: is told each logged row.
          tick: is called after each step.

        Raises:
          ValueError: the loss is no number any more; the checkpoints before are kept.
          OSError: a checkpoint cannot be written.
        """
        for manager in (self._last, self._best):
            for step in manager.all_steps()[:-1]:  # what a kill left while it was replaced
                manager.delete(step)
        until = self.optim.steps if until is None else min(until, self.optim.steps)
        forget_after(self.folder, int(self.state.step))
        if self._goes_on and self._last.latest_step() is None:
            # Training may make a good head worse: then it is the best one.
            forget_after(self.folder, -1)
            row = {"step": 0} | self.evaluate()
            add_row(self.folder, row)
            say(row)
            self._keep(0, row)
        said, start = [], time.perf_counter()
        for step in range(int(self.state.step), until):
            self.state, numbers = train_step(
                self.target,
                self.config,
                self.loss,
                self.optim,
                self.taps,
                self.state,
                self.frozen,
                self.batches[step],
                self.mesh,
            )
            said.append(numbers)
            tick()
            if (step + 1) % self.optim.eval_every == 0 or step + 1 == self.optim.steps:
                jax.block_until_ready(said)  # steps are dispatched long before they are done
                row = summary(step + 1, said, time.perf_counter() - start)
                if not math.isfinite(row["loss"]):
                    why = "try a lower optim.learning_rate"
                    if (states := self.batches[step].taps) is not None and np.isnan(states).any():
                        why = "the library's taps are damaged"
                    raise ValueError(f"the loss is {row['loss']} at step {step + 1}: {why}")
                row |= self.evaluate()
                add_row(self.folder, row)
                say(row)
                self._keep(step + 1, row)
                said, start = [], time.perf_counter()

    def evaluate(self, head: dict[str, Any] | None = None) -> dict[str, Any]:
        """Held-out acceptance by plan, and the share of rounds that reach each depth; default: of the head as it is."""
        head, dtype = self.state.head if head is None else head, self.frozen.output.dtype
        head = self.as_params(jax.tree.map(lambda x: x.astype(dtype), head))
        params = {"target": self.frozen.target, "head": head}
        return evaluate(self.plans, params, self.recordings, self.optim.eval_tokens)

    def _keep(self, step: int, row: dict[str, Any]) -> None:
        found = np.float32(row[next(iter(self.plans))])  # as it is kept: of equal ones the first
        if found > float(self.state.best):
            self.state = self.state._replace(best=shard_params(self.mesh, jnp.float32(found)))
            self._save(self._best, step)
        self._save(self._last, step)

    def _save(self, manager: ocp.CheckpointManager, step: int) -> None:
        if step in manager.all_steps():
            return  # a kill after this one and before the other: what is there is the same
        leaves = jax.tree.leaves(self.state)
        # Of a disk that is full orbax tells at length, in tracebacks.
        check_writable(Path(manager.directory), sum(x.nbytes + (4 << 10) for x in leaves))
        with put_off():
            manager.save(step, args=ocp.args.StandardSave(self.state), force=True)
            manager.wait_until_finished()

    def best_state(self) -> TrainState:
        """The state with the best held-out acceptance length so far, its ``best``; and after which ``step`` it was.

        Raises:
          ValueError: there is no checkpoint yet, or it cannot be read.
        """
        step = self._best.latest_step()
        while True:
            if step is None:
                raise ValueError(f"{self.folder} has no checkpoint yet")
            try:
                return self._restore(self._best, step)
            except HeadError:
                self._best.reload()  # another process may train, and have put a better one in its place
                if (newer := self._best.latest_step()) == step:
                    raise
                step = newer

    def best_head(self) -> dict[str, Any]:
        """The weights of ``best_state``."""
        return self.best_state().head


def summary(step: int, said: Sequence[dict[str, Array]], seconds: float) -> dict[str, Any]:
    """A row of the log: means over the steps since the row before."""
    numbers = jax.tree.map(lambda *x: np.mean([np.asarray(y) for y in x], axis=0), *said)
    hits = {
        name: [round(float(x), 4) for x in numbers[name] / np.maximum(numbers["slots"], 1e-9)]
        for name in ("hits", "base_hits")
        if name in numbers
    }
    slots = sum(float(np.sum(one["slots"])) for one in said)
    return {
        "step": step,
        "loss": round(float(numbers["loss"]), 5),
        "gradient": round(float(numbers["gradient"]), 5),
        **hits,
        "slots_per_second": round(slots / seconds, 1),
        "seconds": round(seconds, 1),
    }
