"""``python -m jspec.train``: from a target to a draft head, in stages that can be run apart and resumed.

text     the target writes its training text
head     the head is trained on it
export   the best checkpoint becomes a head that ``python -m jspec.run --head`` takes, with figures
"""

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jspec.benches import read_prompts
from jspec.checkpoint import export_head
from jspec.device import keep_compilations, pick_accelerator
from jspec.heads.config import HeadConfig, config_for, spread_taps
from jspec.heads.parallel import with_draft_ids
from jspec.methods import ddtree, dflash
from jspec.models.config import read_json
from jspec.models.load import Target, load_target
from jspec.state import Plan
from jspec.train.card import model_card
from jspec.train.corpus import store_answers
from jspec.train.curves import draw_curves
from jspec.train.data import Text, draft_vocabulary, read_libraries, split
from jspec.train.log import read_log
from jspec.train.loop import Trainer
from jspec.train.options import STAGES, TrainOptions, parse
from jspec.train.text import put, write_text


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 2 for an error of the user's or a full disk, 130 when interrupted."""
    try:
        options, stages = parse(argv)
        pick_accelerator(options.accel)
        keep_compilations()
        target = load_target(options.target)
        check(options, target)
        for stage in STAGES:
            if stage in stages:
                {"text": write, "head": train, "export": export}[stage](options, target)
    except (ValueError, OSError) as error:
        print(f"jspec: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def check(options: TrainOptions, target: Target) -> None:
    """Finds what would stop a run before its text is written.

    Raises:
      ValueError: a file where there must be a folder, or a head that cannot be.
    """
    for name in ("library", "run"):
        path = Path(getattr(options, name))
        if path.exists() and not path.is_dir():
            raise ValueError(f"{name} must be a folder, {path} is a file")
    head_config(options, target)


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


def write(options: TrainOptions, target: Target) -> None:
    """The text stage."""
    config = options.text
    given = [] if config.prompts is None else read_prompts(config.prompts)
    bars: dict[str, tqdm] = {}
    new = 0

    def progress(what: str, total: int, tokens: int) -> None:
        nonlocal new
        if what not in bars:
            bars[what] = tqdm(desc=what, total=total, unit=" texts", dynamic_ncols=True)
            new = 0
        new += tokens
        seconds = max(time.time() - bars[what].start_t, 1e-9)
        bars[what].set_postfix_str(f"{new / seconds:.0f} tokens/s", refresh=False)
        bars[what].update()

    make = store_answers if config.answers == "given" else write_text
    make(target, config, Path(options.library), library_taps(options, target), given, progress)
    for bar in bars.values():
        bar.close()


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


def trainer(options: TrainOptions, target: Target) -> Trainer:
    """The run of the options' folder.

    Raises:
      ValueError: no text, or a folder that another config's run is in.
    """
    config = head_config(options, target)
    folders = [Path(name) for name in (options.library, *options.also)]
    texts, taps = read_libraries(folders, target.fingerprint)
    check_config(options, target, texts)
    texts, held_out = split(texts, options.optim.held_out)
    texts = texts[: options.max_texts]
    ids = None
    if config.draft_vocab_size is not None:
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
    )


def check_config(options: TrainOptions, target: Target, texts: Sequence[Text]) -> None:
    """Writes a run's config into its folder, or makes sure that it is the one there, and its text that of now.

    Raises:
      ValueError: it is another.
    """
    wanted = dataclasses.asdict(options)
    for where in ("library", "also", "run", "accel", "text"):
        del wanted[where]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.asarray([len(text.tokens), text.start], np.int32).tobytes())
        digest.update(text.tokens.tobytes())
    wanted |= {"target_fingerprint": target.fingerprint, "texts": digest.hexdigest()[:16]}
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


def train(options: TrainOptions, target: Target) -> None:
    """The head stage."""
    run = trainer(options, target)
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


def export(options: TrainOptions, target: Target) -> None:
    """The export stage: ``RUN/head`` in the published layout."""
    run = trainer(options, target)
    folder = Path(options.run) / "head"
    head, dtype = run.as_params(run.best_head()), jnp.bfloat16
    card = model_card(
        options,
        run.config,
        head,
        dtype.dtype.name,
        [read_json(Path(name) / "text.json") for name in (options.library, *options.also)],
        run.texts,
        run.response_tokens,
        read_log(run.folder),
        run.best_step,
    )
    export_head(folder, run.config, head, dtype, card)
    print(f"{folder}: held-out acceptance length {float(run.state.best):.3f}")


if __name__ == "__main__":
    sys.exit(main())
