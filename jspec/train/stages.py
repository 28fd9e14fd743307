"""The stages of a run, as ``python -m jspec.train`` runs them; each goes on where it was stopped."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jspec.benches import read_prompts
from jspec.checkpoint import export_head, head_fingerprint, locate_head, read_head
from jspec.heads.config import HeadConfig, check_pair, config_for, spread_taps
from jspec.heads.parallel import trained, with_draft_ids
from jspec.methods import ddtree, dflash
from jspec.models.config import read_json
from jspec.models.load import Target
from jspec.state import Plan
from jspec.train.card import model_card
from jspec.train.corpus import store_answers
from jspec.train.curves import draw_curves
from jspec.train.data import Text, draft_vocabulary, read_libraries, split
from jspec.train.log import read_log
from jspec.train.loop import Trainer
from jspec.train.options import TrainOptions
from jspec.train.text import put, write_text


def head_taps(options: TrainOptions, target: Target) -> tuple[int, ...]:
    """The layers that the head reads."""
    layers = target.config.num_layers
    return options.head.taps or spread_taps(layers, min(5, max(1, layers - 3)))


def library_taps(options: TrainOptions, target: Target) -> tuple[int, ...]:
    """The layers that are kept with the text."""
    if not options.keep_taps:
        return ()
    last = (target.config.num_layers,) if options.teacher else ()
    return (*head_taps(options, target), *last)


def write_library(options: TrainOptions, target: Target) -> None:
    """The text stage: what is still missing of ``options.library``, with progress on stderr.

    Raises:
      ValueError: a folder that holds text of another config, prompts that cannot be read, or no head can be as the
        options ask for.
    """
    _check_places(options)
    head_config(options, target)  # before hours are spent
    config = options.text
    given = [] if config.prompts is None else read_prompts(config.prompts)
    bars: dict[str, tqdm] = {}
    new = 0

    def progress(what: str, total: int, tokens: int) -> None:
        nonlocal new
        if what not in bars:
            bar = tqdm(desc=what, total=total, unit=" texts", dynamic_ncols=True)
            bars[what] = open_bars.enter_context(bar)
            new = 0
        new += tokens
        seconds = max(time.time() - bars[what].start_t, 1e-9)
        bars[what].set_postfix_str(f"{new / seconds:.0f} tokens/s", refresh=False)
        bars[what].update()

    make = store_answers if config.answers == "given" else write_text
    with contextlib.ExitStack() as open_bars:
        make(target, config, Path(options.library), library_taps(options, target), given, progress)


def _check_places(options: TrainOptions) -> None:
    for name in ("library", "run"):
        path = Path(getattr(options, name))
        if path.exists() and not path.is_dir():
            raise ValueError(f"{name} must be a folder, {path} is a file")


def head_config(options: TrainOptions, target: Target) -> HeadConfig:
    """The head's config.

    Raises:
      ValueError: no such mask token, or sizes that no head can have.
    """
    shape = options.head
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
    )


def open_run(options: TrainOptions, target: Target) -> Trainer:
    """The run in ``options.run``, as far as it has come.

    Raises:
      ValueError: no text, or a folder that another config's run is in.
    """
    _check_places(options)
    config = head_config(options, target)
    made_of = init = ids = None
    if options.init is not None:
        made_of, init, ids = _first_weights(options.init, config, target)
    texts, taps = read_libraries(_libraries(options), target.fingerprint)
    _check_config(options, target, texts, made_of)
    texts, held_out = split(texts, options.optim.held_out)
    texts = texts[: options.max_texts]
    if init is None and config.draft_vocab_size is not None:
        ids = draft_vocabulary(texts, config.draft_vocab_size, target.config.vocab_size)

    def as_params(head):
        return head if ids is None else with_draft_ids(head, target.params, ids)

    budget = options.optim.eval_budget
    plans = {
        "tree": Plan(target.config, ddtree(config, budget)),
        "chain": Plan(target.config, dflash(config, config.block_size)),
    }
    return Trainer(
        target,
        config,
        texts,
        held_out,
        taps,
        plans,
        Path(options.run),
        batch=options.batch,
        loss=options.loss,
        optim=options.optim,
        draft_ids=ids,
        as_params=as_params,
        init=init,
    )


def _first_weights(name: str, config: HeadConfig, target: Target):
    """Fingerprint, weights and draft ids of the head that a run goes on from."""
    found, arrays = read_head(locate_head(name))
    check_pair(found, target.config, target.fingerprint)
    free = ("block_size", "causal", "target_fingerprint")  # the last was checked, if it is there
    wanted, there = dataclasses.asdict(config), dataclasses.asdict(found)
    differ = [key for key in wanted if key not in free and there[key] != wanted[key]]
    if differ:
        found_are = "; ".join(f"{key} {there[key]}, not {wanted[key]}" for key in differ)
        raise ValueError(f"init: the head {name} has {found_are}")
    return head_fingerprint(found, arrays), trained(arrays), arrays.get("draft_ids")


def _card(name: str | None) -> str | None:
    """What a head says of itself, where it does."""
    try:
        return name and (locate_head(name) / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _libraries(options: TrainOptions) -> list[Path]:
    return [Path(name) for name in (options.library, *options.also)]


def _check_config(
    options: TrainOptions, target: Target, texts: Sequence[Text], init: str | None
) -> None:
    """Writes a run's config into its folder, or makes sure that it is the one there, and its text that of now."""
    wanted = dataclasses.asdict(options)
    for where in ("library", "also", "run", "accel", "text"):
        del wanted[where]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.asarray([len(text.tokens), text.start], np.int32).tobytes())
        digest.update(text.tokens.tobytes())
    wanted |= {"target_fingerprint": target.fingerprint, "texts": digest.hexdigest()[:16]}
    wanted["init"] = init  # its fingerprint: what its folder is called does not matter
    wanted = json.loads(json.dumps(wanted))
    path = Path(options.run) / "config.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, lambda file: file.write(json.dumps(wanted, indent=1).encode()))
        return
    there = read_json(path)
    if changed := sorted(name for name in wanted if there.get(name) != wanted[name]):
        raise ValueError(
            f"{path.parent} holds a run of another config ({', '.join(changed)} differ): "
            "use another --run or the old config"
        )


def train_head(options: TrainOptions, target: Target) -> Trainer:
    """The head stage: trains to the end, with a line of the log at each evaluation; ``curves.svg`` in the run's folder.

    Raises:
      ValueError: as ``open_run``.
    """
    run = open_run(options, target)
    done = int(run.state.step)
    with tqdm(total=options.optim.steps, initial=done, unit=" steps", desc="head") as bar:

        def say(row):
            bar.update(row["step"] - bar.n)
            bar.write(
                f"step {row['step']}: loss {row['loss']:.3f}, held-out acceptance length {row['tree']:.3f}"
                f" (tree), {row['chain']:.3f} (chain), {row['slots_per_second']:.0f} slots/s"
            )

        run.run(say=say, tick=bar.update)
    draw_curves(Path(options.run))
    return run


def export_trained(options: TrainOptions, target: Target) -> Path:
    """The export stage: the best checkpoint becomes ``RUN/head``, in the published layout, with a model card.

    Raises:
      ValueError: as ``open_run``, or no checkpoint yet.
    """
    run = open_run(options, target)
    folder = Path(options.run) / "head"
    head, dtype = run.as_params(run.best_head()), jnp.bfloat16
    card = model_card(
        options,
        run.config,
        head,
        jnp.dtype(dtype).name,
        [read_json(library / "text.json") for library in _libraries(options)],
        run.texts,
        run.response_tokens,
        read_log(run.folder),
        run.best_step,
        _card(options.init),
    )
    export_head(folder, run.config, head, dtype, card)
    print(f"{folder}: held-out acceptance length {float(run.state.best):.3f}")
    return folder
