"""Text in, text out: prompts to ids, tokens to what a reader is shown, and ``generate_text``."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int32

from jspec.attention import Implementation
from jspec.benches import Prompt, is_message, is_text, user_turn
from jspec.checkpoint import Head
from jspec.cost.profile import setting_of
from jspec.cost.store import ready_profile
from jspec.driver import Finished, decode_all
from jspec.heads.eagle_config import EagleConfig
from jspec.method import Memory, Method, check_method, check_range
from jspec.methods import dartree, ddtree, eagle3, prompt_lookup
from jspec.methods import smart as combine
from jspec.models.load import Target
from jspec.models.tokenizer import Message
from jspec.sampling import Sampling
from jspec.state import Plan, capacity_for
from jspec.stopping import cut_at, stop_table

# Nodes of a tree where the user names no number. On a CPU the fastest of 4, 16 and 64 without a head, and of 4, 8 and
# 16 with one (experiments/baselines, experiments/jetspec); on accelerators, where rows cost less, none was measured.
CPU_BUDGET, ACCELERATOR_BUDGET = 4, 32
SMART_BUDGET = 32  # where smart chooses among them


@dataclasses.dataclass(frozen=True)
class Answer:
    """One prompt's answer.

    Attributes:
      id: of the prompt.
      text: what the target wrote, without its end token and from no stop string on.
      finished: its tokens and the counts of its rounds.
    """

    id: str
    text: str
    finished: Finished


def usual_budget(smart: bool = False) -> int:
    """Nodes of a tree where the user names no number; most of them, where ``smart`` chooses."""
    if smart:
        return SMART_BUDGET
    return CPU_BUDGET if jax.default_backend() == "cpu" else ACCELERATOR_BUDGET


def default_method(head: Head | None = None, budget: int | None = None) -> Method:
    """With a head the likeliest nodes of what it drafts; without one the best method that needs no training."""
    budget = usual_budget() if budget is None else budget
    if head is None:
        return prompt_lookup(budget)
    plain = ddtree if head.config.correction is None else dartree
    make = eagle3 if isinstance(head.config, EagleConfig) else plain
    return make(head.config, budget)


def generate_text(
    target: Target,
    prompts: str | Prompt | Sequence[str | Prompt | Message | Sequence[Message]],
    method: Method | None = None,
    *,
    head: Head | None = None,
    smart: bool = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = 128,
    stop: str | Sequence[str] = (),
    batch: int = 1,
    memory: Memory = None,
    attention: Implementation | None = None,
) -> list[Answer]:
    """Answers prompts with a target and a method: the target's own text, whatever the method.

    Args:
      target: of ``jspec.load``.
      prompts: one prompt or a sequence of them. A prompt is a user's message, a list of messages
        ``{"role", "content"}``, or a ``Prompt``, which can hold raw text too.
      method: who drafts; default: ``default_method(head)``.
      head: of ``jspec.load_head``, for a method that has one; none is taken by default.
      smart: verify, and draft, only what pays: see ``jspec.smart``. What rounds cost is measured the first time and
        kept in the user's cache.
      temperature: 0 takes the likeliest token.
      top_p: see ``Sampling``, as for the other filters.
      top_k: 0 is off.
      min_p: 0 is off.
      seed: of the draws; a prompt's answer depends on it and on the prompt's place in ``prompts``.
      max_new_tokens: of each answer, its end token included.
      stop: strings that end an answer; they are not part of it.
      batch: how many prompts are decoded at a time.
      memory: what the method kept from earlier requests.
      attention: implementation of ``tree_attention``; None picks for the platform.

    Returns:
      The answers in the prompts' order.

    Raises:
      ValueError: an argument out of range, what is no prompt, or one that does not fit the target's context.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    if method is None:
        method = default_method(head, usual_budget(smart))
    check_method(method)
    method = combine(method) if smart else method
    plan = Plan(target.config, method, sampling, attention=attention, mesh=target.mesh)
    if smart and target.mesh is not None:
        raise ValueError("smart takes one device: what rounds cost on a mesh is not measured yet")
    params = {"target": target.params} | ({} if head is None else {"head": head.params})
    stop = (stop,) if isinstance(stop, str) else stop or ()
    if not isinstance(stop, Sequence) or not all(map(is_text, stop)):
        raise ValueError(f"stop must be texts, got {stop!r}")
    stop, asked = tuple(stop), _as_prompts(prompts)
    ids = [encode_prompt(target, prompt) for prompt in asked]
    stops = target_stops(target, stop)
    if smart and method.budget > 1:
        check_range("batch", batch, 1)
        check_range("max_new_tokens", max_new_tokens, 1)
        capacity = capacity_for(plan, max(map(len, ids), default=1) + max_new_tokens)
        names = target.fingerprint, None if head is None else head.fingerprint
        setting = setting_of(plan, params, *names, batch, capacity)
        params["cost"] = ready_profile(plan, params, setting, stops=stops).cost()
    done, _ = decode_all(
        plan,
        params,
        ids,
        max_new_tokens=max_new_tokens,
        batch=batch,
        seed=seed,
        stops=stops,
        memory=memory,
    )
    return [Answer(p.id, shown_text(target, x.tokens, stop), x) for p, x in zip(asked, done)]


def _as_prompts(prompts) -> list[Prompt]:
    """A list of prompts, whichever way they were given."""
    single = isinstance(prompts, str | Prompt | dict)
    if not (single or isinstance(prompts, Sequence)):
        raise ValueError(f"prompts must be texts or messages, got {prompts!r}")
    if single or (prompts and all(isinstance(one, dict) for one in prompts)):
        prompts = [prompts]
    return [_as_prompt(prompt, str(number)) for number, prompt in enumerate(prompts, 1)]


def _as_prompt(prompt, id: str) -> Prompt:
    if isinstance(prompt, Prompt) and (prompt.text is None or is_text(prompt.text)):
        return prompt
    if is_text(prompt):
        return user_turn(id, prompt)
    messages = (prompt,) if isinstance(prompt, dict) else prompt
    if isinstance(messages, list | tuple) and messages and all(map(is_message, messages)):
        return Prompt(id, messages=tuple(messages))
    raise ValueError(
        f"prompts: {prompt!r} is no text, no Prompt and no list of "
        '{"role": text, "content": text}'
    )


def encode_prompt(target: Target, prompt: Prompt, any_length: bool = False) -> list[int]:
    """A prompt's token ids, at least one.

    A text without any is the target's begin token (else its end token). A lone user turn is raw text to a target that
    has no chat template. With ``any_length`` it need not fit into the target's context.

    Raises:
      ValueError: a prompt that leaves the target's context no room for an answer, a conversation that its chat
        template refuses, or a text that becomes tokens beyond the target's vocabulary.
    """
    name = f"prompt {prompt.id!r}" + (f" ({prompt.where})" if prompt.where else "")
    tokenizer, room = target.tokenizer, target.config.max_positions - 1
    lone = [m["role"] for m in prompt.messages] == ["user"]
    try:
        if lone and not tokenizer.has_chat_template:
            ids = tokenizer.encode(prompt.messages[0]["content"])
        else:
            ids = prompt.encode(tokenizer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if len(ids) > room and not any_length:
        raise ValueError(f"{name} has {len(ids)} tokens, the target's context takes at most {room}")
    vocab = target.config.vocab_size
    if ids and max(ids) >= vocab:
        raise ValueError(
            f"{name} has the token {max(ids)}, the target's vocabulary ends at {vocab - 1}"
        )
    first = (tokenizer.bos_id, *tokenizer.eos_ids, 0)
    return ids or [next(i for i in first if i is not None and 0 <= i < vocab)]


def target_stops(target: Target, stop: Sequence[str] = ()) -> Int32[np.ndarray, "S V"]:
    """The automaton that ends a row at the target's end tokens and at stop strings.

    Raises:
      ValueError: an empty stop string.
    """
    vocab = target.config.vocab_size
    ids = [i for i in target.config.eos_ids if 0 <= i < vocab]
    return stop_table(vocab, ids, stop, target.tokenizer.token_bytes()[:vocab] if stop else None)


def shown_text(target: Target, tokens: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text of an answer's tokens: no end token, no special ones, nothing from a stop string on."""
    if tokens and tokens[-1] in target.config.eos_ids:
        tokens = tokens[:-1]
    return cut_at(target.tokenizer.decode(tokens), stop)


class Typist:
    """Gives out an answer's text while its tokens come, each piece once, and none that may still change.

    Attributes:
      text: all that was given out.
    """

    def __init__(self, target: Target, stop: Sequence[str] = ()):
        self._target, self._stop, self._tokens = target, stop, []
        self.text = ""

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that further tokens settle; with ``last`` all of the rest.

        Held back are half a character's bytes and what may turn out to begin a stop string.
        """
        self._tokens += tokens
        text = shown_text(self._target, self._tokens, self._stop)
        if not last:
            text = text.rstrip("\ufffd")
            text = text[: len(text) - max((_overlap(text, s) for s in self._stop), default=0)]
        fresh = text[len(self.text) :]
        self.text += fresh
        return fresh


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that are the beginning of a stop string."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
