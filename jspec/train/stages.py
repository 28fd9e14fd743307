"""The stages of a run, as ``python -m jspec.train`` runs them; each goes on where it was stopped."""

import contextlib
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jspec.benches import read_prompts
from jspec.checkpoint import check_place, export_head
from jspec.heads.config import config_for, spread_taps
from jspec.heads.eagle_config import EagleConfig, eagle_config_for, published_taps
from jspec.heads.kinds import AnyConfig, code_of
from jspec.heads.parallel import init_head
from jspec.method import MAX_BUDGET, Method
from jspec.methods import dartree, ddtree, dflash, domino, eagle3
from jspec.models.config import read_json
from jspec.models.load import Target
from jspec.state import Plan
from jspec.train.card import model_card
from jspec.train.corpus import store_answers
from jspec.train.curves import draw_curves
from jspec.train.data import draft_vocabulary, read_libraries, split
from jspec.train.interrupts import heard
from jspec.train.lock import only_one
from jspec.train.log import read_log
from jspec.train.loop import Trainer
from jspec.train.options import TrainOptions
from jspec.train.origin import (
    Origin,
    check_origin,
    check_record,
    read_origin,
    run_record,
    write_record,
)
from jspec.train.text import Library, read_turns, write_text


def head_taps(options: TrainOptions, target: Target) -> tuple[int, ...]:
    """The layers that the head reads."""
    layers = target.config.num_layers
    if options.head.kind == "eagle":
        return options.head.taps or published_taps(layers)
    return options.head.taps or spread_taps(layers, min(5, max(1, layers - 3)))


def library_taps(options: TrainOptions, target: Target) -> tuple[int, ...]:
    """The layers that are kept with the text."""
    if not options.keep_taps:
        return ()
    last = (target.config.num_layers,) if options.teacher else ()
    return tuple(dict.fromkeys((*head_taps(options, target), *last)))


def write_library(options: TrainOptions, target: Target) -> None:
    """The text stage: what is still missing of ``options.library``, with progress on stderr.

    Raises:
      ValueError: a folder that holds text of another config, prompts that cannot be read, or no head can be as the
        options ask for.
    """
    _check_places(options)
    _, options, _ = _start(options, target)  # before hours are spent
    config = options.text
    given = [] if config.prompts is None else read_prompts(config.prompts)
    bars: dict[str, tqdm] = {}
    before: Counter[str] = Counter()
    new = 0

    def progress(what: str, total: int, tokens: int | None) -> None:
        nonlocal new
        if tokens is None:
            before[what] += 1
            return
        if what not in bars:
            bar = tqdm(
                desc=what, total=total, initial=before[what], unit=" texts", dynamic_ncols=True
            )
            bars[what] = open_bars.enter_context(bar)
            new = 0
        if tokens == 0:
            return
        new += tokens
        seconds = max(time.time() - bars[what].start_t, 1e-9)
        bars[what].set_postfix_str(f"{new / seconds:.0f} tokens/s", refresh=False)
        bars[what].update()

    make = store_answers if config.answers == "given" else write_text
    with only_one(Path(options.library)), contextlib.ExitStack() as open_bars:
        make(target, config, Path(options.library), library_taps(options, target), given, progress)
    if config.turns and config.answers != "given":
        ended = len(read_turns(Library(Path(options.library)), config))
        _say(
            f"{ended} of {config.turns} user turns came to an end within text.turn_tokens "
            f"({config.turn_tokens}) and are new"
        )


def _say(line: str) -> None:
    tqdm.write(f"jspec: {line}", file=sys.stderr)


def _check_places(options: TrainOptions) -> None:
    for name in ("library", "run"):
        path = Path(getattr(options, name))
        if path.exists() and not path.is_dir():
            raise ValueError(f"{name} must be a folder, {path} is a file")
    for name in options.also:
        if not (Path(name) / "text.json").is_file():
            raise ValueError(
                f"also: {name} is no library of text: write it first, with --library {name} and the stage text"
            )
    check_place(Path(options.run))


def head_config(options: TrainOptions, target: Target) -> AnyConfig:
    """The head's config.

    Raises:
      ValueError: no such mask token, or sizes that no head can have.
    """
    shape = options.head
    if shape.kind == "eagle":
        return eagle_config_for(
            target.config,
            taps=head_taps(options, target),
            steps=shape.block_size - 1,
            draft_vocab_size=shape.draft_vocab_size,
            own_output=shape.own_output,
            target_fingerprint=target.fingerprint,
        )
    try:
        mask = target.tokenizer.token_id(shape.mask_token)
    except ValueError as error:
        raise ValueError(f"head.mask_token: {error}") from None
    return config_for(
        target.config,
        mask_token_id=mask,
        taps=head_taps(options, target),
        block_size=shape.block_size,
        causal=shape.causal,
        num_layers=shape.num_layers,
        draft_vocab_size=shape.draft_vocab_size,
        target_fingerprint=target.fingerprint,
        shift_labels=shape.shift_labels,
        correction=shape.correction,
    )


def _start(options: TrainOptions, target: Target) -> tuple[Origin | None, TrainOptions, AnyConfig]:
    """The head to go on from, the options with what it settles, and the config of the new head."""
    origin, options = read_origin(options, target)
    config = head_config(options, target)
    if origin is not None:
        check_origin(origin, config)
    return origin, options, config


def open_run(options: TrainOptions, target: Target) -> Trainer:
    """The run in ``options.run``, as far as it has come.

    Raises:
      ValueError: no text, or a folder that another config's run is in.
    """
    _check_places(options)
    return _open_run(*_start(options, target), target)


def _open_run(
    origin: Origin | None,
    options: TrainOptions,
    config: AnyConfig,
    target: Target,
    reads: bool = False,
) -> Trainer:
    folder = Path(options.run)
    texts, taps = read_libraries(_libraries(options), target.fingerprint)
    record = run_record(options, target, texts, origin)
    check_record(folder, record)
    longest = options.batch.lengths[-1]
    texts = [text for text in texts if text.start < longest]  # others are cut before their answer
    if not texts:
        raise ValueError(f"batch.lengths ends at {longest}: every prompt is as long, or longer")
    mask = getattr(config, "mask_token_id", None)
    if mask is not None and (times := sum(int((text.tokens == mask).sum()) for text in texts)):
        _say(
            f"head.mask_token: {options.head.mask_token!r} stands in the text, {times} times; "
            "a token that it never has makes a better head"
        )
    texts, held_out = split(texts, options.optim.held_out)
    texts = texts[: options.max_texts]
    if origin is not None:
        ids = origin.draft_ids
    elif config.draft_vocab_size is not None:
        ids = draft_vocabulary(texts, config.draft_vocab_size, target.config.vocab_size)
    else:
        ids = None

    def as_params(head):
        return head if ids is None else code_of(config).with_draft_ids(head, target.params, ids)

    methods = evaluated(config, options.optim.eval_budget)
    plans = {
        name: Plan(target.config, method, mesh=target.mesh) for name, method in methods.items()
    }
    init = None if origin is None else dict(origin.weights)
    if init is not None and config.correction is not None and "correction" not in init:
        init["correction"] = init_head(config, jax.random.key(options.optim.seed))["correction"]
    run = Trainer(
        target,
        config,
        texts,
        held_out,
        taps,
        plans,
        folder,
        batch=options.batch,
        loss=options.loss,
        optim=options.optim,
        draft_ids=ids,
        as_params=as_params,
        init=init,
        resume=not reads,
    )
    if not reads:
        write_record(folder, record)  # not before all was found to be in order
    return run


def evaluated(config: AnyConfig, budget: int) -> dict[str, Method]:
    """The methods that a head is tried with: trees of ``budget`` nodes, and chains as long as it was trained for."""
    if isinstance(config, EagleConfig):
        shape = config.steps + 1, config.steps, 1
        return {"tree": eagle3(config, budget, config.steps), "chain": eagle3(config, *shape)}
    tree, chain = (ddtree, dflash) if config.correction is None else (dartree, domino)
    longest = min(config.depth + 1, MAX_BUDGET)
    return {"tree": tree(config, budget), "chain": chain(config, longest)}


def _libraries(options: TrainOptions) -> list[Path]:
    return [Path(name) for name in (options.library, *options.also)]


def train_head(options: TrainOptions, target: Target) -> Trainer:
    """The head stage: trains to the end, with a line of the log at each evaluation; ``curves.svg`` in the run's folder.

    Raises:
      ValueError: as ``open_run``.
    """
    _check_places(options)
    started = _start(options, target)
    with only_one(Path(options.run)):  # before its record is looked at, or written
        run = _open_run(*started, target)
        _train(run, options.optim.steps)
    draw_curves(Path(options.run))
    return run


def _train(run: Trainer, steps: int) -> None:
    """Trains to the end, with progress on stderr."""
    initial = int(run.state.step)
    with heard() as look, tqdm(total=steps, initial=initial, unit=" steps", desc="head") as bar:

        def tell(row):
            bar.update(row["step"] - bar.n)
            held_out = (
                f"held-out acceptance length {row['tree']:.3f} (tree), {row['chain']:.3f} (chain)"
            )
            if row["step"] == 0:
                bar.write(f"step 0, as it was: {held_out}")
                return
            speed = f"{row['slots_per_second']:.0f} slots/s"
            bar.write(f"step {row['step']}: loss {row['loss']:.3f}, {held_out}, {speed}")

        def tick():
            look()
            bar.update()

        run.run(say=tell, tick=tick)


def export_trained(options: TrainOptions, target: Target) -> Path:
    """The export stage: the best checkpoint becomes ``RUN/head``, in the published layout, with a model card.

    Raises:
      ValueError: as ``open_run``, or no checkpoint yet.
    """
    if not (Path(options.run) / "best").is_dir():
        raise ValueError(f"{options.run} has no checkpoint yet")
    _check_places(options)
    origin, options, config = _start(options, target)
    run = _open_run(origin, options, config, target, reads=True)
    best = run.best_state()
    folder = Path(options.run) / "head"
    head, dtype = run.as_params(best.head), jnp.bfloat16
    card = model_card(
        options,
        run.config,
        head,
        jnp.dtype(dtype).name,
        target.params["embed"].dtype.name,
        [read_json(library / "text.json") for library in _libraries(options)],
        run.texts,
        run.response_tokens,
        read_log(run.folder),
        int(best.step),
        origin and origin.card,
    )
    export_head(folder, run.config, head, dtype, card)
    print(f"{folder}: held-out acceptance length {float(best.best):.3f}")
    if int(best.step) == 0:
        print(f"No step was better than the head it goes on from: {folder} is that head.")
    return folder
