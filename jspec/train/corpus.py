"""Training text from a corpus: answers that somebody else gave, and the target's states while it reads them.

It is there to compare with: a head that learns from answers of others foresees its target worse (see
``jspec.train.text``).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jspec.benches import Prompt
from jspec.models.load import Target
from jspec.train.features import states_of
from jspec.train.text import MARK, Library, Progress, TextConfig, Written, half, in_order


def turn_end(target: Target) -> int:
    """The token that ends an answer of the target's.

    Of several end tokens it is the one that the chat template writes after an assistant's words, else the first.

    Raises:
      ValueError: a target without an end token.
    """
    ends = [i for i in target.config.eos_ids if 0 <= i < target.config.vocab_size]
    if not ends:
        raise ValueError("the target has no end token that could end a given answer")
    if not target.tokenizer.has_chat_template:
        return ends[0]
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": MARK}]
    text = target.tokenizer.chat(turns, add_generation_prompt=False)
    after = target.tokenizer.encode(text.rpartition(MARK)[2], add_special_tokens=False)
    return next((i for i in after if i in ends), ends[0])


def store_answers(
    target: Target,
    config: TextConfig,
    folder: Path,
    taps: tuple[int, ...] = (),
    given: Sequence[Prompt] = (),
    progress: Progress = lambda what, total, tokens: None,
) -> None:
    """Stores what is still missing of a library whose answers are given: as ``write_text``, but nothing is decoded.

    Answers end with the target's own end token, or are cut at ``config.max_new_tokens``.

    Args:
      target: reads.
      config: its ``answers`` are "given".
      folder: of the library.
      taps: kept with the text.
      given: the prompts of ``config.prompts``.
      progress: is called for every text that is stored.

    Raises:
      ValueError: a prompt without an answer; a target without an end token.
    """
    for prompt in given:
        if prompt.answer is None:
            raise ValueError(
                f'prompt {prompt.id!r} ({prompt.where}) has no "answer" that is a text'
            )
    end, room = turn_end(target), target.config.max_positions
    library = Library(folder)
    library.open(target, config, taps)
    prompts = in_order(target, config, given)
    none = np.zeros((0, 0, 0), np.float16)
    for shard, first in enumerate(range(0, len(prompts), config.shard)):
        if library.has(shard):
            for _ in prompts[first : first + config.shard]:
                progress("answers", len(prompts), None)
            continue
        texts = []
        for number, (prompt, ids) in enumerate(prompts[first : first + config.shard], first):
            answer = target.tokenizer.encode(prompt.answer, add_special_tokens=False)
            tokens = [*ids, *[*answer, end][: config.max_new_tokens]][:room]
            texts.append(Written(number, np.asarray(tokens, np.int32), len(ids), none))
        read = ((i, none) for i in range(len(texts)))
        if taps:
            tokens = [one.tokens for one in texts]
            read = states_of(target.config, target.params, tokens, taps)
        for i, states in read:
            texts[i] = texts[i]._replace(taps=half(states))
            progress("answers", len(prompts), len(texts[i].tokens) - texts[i].start)
        library.save(shard, texts, wide=target.config.vocab_size > 1 << 16)
