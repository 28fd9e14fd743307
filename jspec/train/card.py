"""The model card of a trained head: the README.md beside it, out of what its run and its text say of themselves."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jspec.heads.eagle_config import EagleConfig
from jspec.heads.kinds import AnyConfig
from jspec.heads.parallel import trained
from jspec.train.options import TrainOptions


def model_card(
    options: TrainOptions,
    config: AnyConfig,
    head: Mapping[str, Any],
    dtype: str,
    products: str,
    libraries: Sequence[Mapping[str, Any]],
    texts: int,
    response_tokens: int,
    log: Sequence[Mapping[str, Any]],
    best: int,
    before: str | None = None,
) -> str:
    """A card in Markdown: the same for the same files.

    Args:
      options: of the run.
      config: the head's.
      head: its arrays; only their sizes matter.
      dtype: of the weights in the file.
      products: the dtype that training multiplied in.
      libraries: the text.json of each library of text.
      texts: how many were trained on.
      response_tokens: tokens of those texts' answers.
      log: see ``jspec.train.log``.
      best: the step whose weights these are.
      before: the card of the head that the run goes on from, whose training is told too.
    """
    method, does, tried = _kind(config)
    size = sum(x.size for x in jax.tree.leaves(trained(head)))
    given = any(one.get("answers") == "given" for one in libraries)
    origin = "whose answers were given" if given else "written by the target"
    drafted = config.draft_vocab_size or config.vocab_size
    facts = {
        "method": f"{method}: {does}",
        "target": f"{options.target}, fingerprint {config.target_fingerprint}",
        "reads": f"layers {_plain(config.taps)} of the target's {config.target_layers}",
        "layers": f"{config.num_layers}, width {config.hidden_size}, feed-forward {config.ffn_size}, "
        f"{config.num_heads} query and {config.num_kv_heads} key/value heads of {config.head_dim}",
        "parameters": f"{size:,} in {dtype}; {_borrowed(config)} the target's own",
        "draft vocabulary": f"{drafted:,} of the target's {config.vocab_size:,} tokens",
        **_correction(config, options),
    }
    if not isinstance(config, EagleConfig):
        facts["mask token"] = f"`{options.head.mask_token}`, id {config.mask_token_id}"
    training = {
        "steps": f"{options.optim.steps:,}; these are the weights of step {best:,}",
        "step": _listed(options.batch),
        "dtype": f"{products} in products, float32 in what is trained",
        "loss": _listed(options.loss),
        "optimiser": f"AdamW, linear warm-up, cosine to zero; {_listed(options.optim)}",
    }
    if any("seconds" in row for row in log):
        minutes = sum(row.get("seconds", 0) for row in log) / 60
        training["time"] = f"{minutes:.1f} minutes for the steps, evaluations left out"
    lines = [
        f"# A{'n' if method[0] in 'AEIO' else ''} {method} head for {options.target}",
        "",
        f"Trained with jspec. `python -m jspec.run --target {options.target} "
        "--head DIR` decodes with it; DIR is this folder.",
        "",
        *_table(facts),
        "",
        "## Text",
        "",
        f"{texts:,} texts with {response_tokens:,} tokens of answers, {origin}:",
        *(line for one in libraries for line in ("", *_table(_shown(one)))),
        "",
        "## Training",
        "",
        *_table(training),
        "",
    ]
    if options.init is not None:
        lines += ["It goes on from a head that was trained before:", ""]
        told = (before or "").partition("## Training\n")[2].partition("\n## ")[0].strip()
        lines += [told or "no card says how.", ""]
    row = next((row for row in log if row["step"] == best), None)
    if row is not None:
        lines += [
            "## Held-out figures",
            "",
            f"Acceptance length (tokens a round, bonus included) by replay of {options.optim.eval_tokens} tokens each "
            f"of up to {options.optim.eval_texts} texts that this run was not trained on:",
            "",
            f"- {row['tree']:.3f} with the best trees of {options.optim.eval_budget} nodes (`{tried[0]}`);",
            f"- {row['chain']:.3f} with chains of {config.depth + 1} nodes (`{tried[1]}`).",
            "",
        ]
    return "\n".join(lines)


def _kind(config: AnyConfig) -> tuple[str, str, tuple[str, str]]:
    """A head's method, what it does, and the methods it was evaluated with."""
    if isinstance(config, EagleConfig):
        does = f"one layer drafts a token a pass; {config.steps} passes were unrolled in training"
        return "EAGLE-3", does, ("eagle3", "eagle3 --width 1")
    name, block = ("JetSpec", "causal") if config.causal else ("DFlash", "bidirectional")
    tried = ("ddtree", "dflash")
    if config.correction is not None:
        name, tried = "Domino", ("dartree", "domino")
    does = f"one pass drafts a {block} block of {config.block_size} slots, its root included"
    return name, does, tried


def _borrowed(config: AnyConfig) -> str:
    own = isinstance(config, EagleConfig) and config.own_output
    return "the embedding is" if own else "embedding and output rows are"


def _correction(config: AnyConfig, options: TrainOptions) -> dict[str, str]:
    """What is to be said of a Domino head alone."""
    if (own := config.correction) is None:
        shifted = getattr(config, "shift_labels", False)
        return {"labels": "each slot drafts the token after it"} if shifted else {}
    labels = "after its own place" if config.shift_labels else "at its own place"
    decay = 1.0 if options.loss.base_decay is None else options.loss.base_decay
    return {
        "correction": f"a GRU of width {own.gru_size} and a projection of rank {own.rank}, from draft {own.prefix + 1} "
        f"on; a slot drafts the token {labels}",
        "curriculum": f"the uncorrected logits' share of the loss falls from 1 to 0 in {decay:g} of the run"
        if decay
        else "none: only the corrected logits are trained",
    }


def _shown(library: Mapping[str, Any]) -> dict[str, Any]:
    hidden = ("batch", "target", "taps")  # the first means nothing here, the others were said
    if library.get("turns") == 0:
        hidden += ("turns", "systems", "turn_temperature", "turn_tokens")
    return {k: value for k, value in library.items() if value is not None and k not in hidden}


def _table(facts: Mapping[str, Any]) -> list[str]:
    rows = (f"| {name.replace('_', ' ')} | {_plain(value)} |" for name, value in facts.items())
    return ["| | |", "| :-- | :-- |", *rows]


def _listed(config) -> str:
    """The fields of a config that are on."""
    values = dataclasses.asdict(config).items()
    return ", ".join(f"{name} {_plain(value)}" for name, value in values if value is not None)


def _plain(value) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_plain(one) if one != "" else "(none)" for one in value)
    return " ".join(str(value).split()).replace("|", "\\|")
