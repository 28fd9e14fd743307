"""What a command is to do: from its options to a target, a head, a plan and the prompts' ids."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jspec.attention import Implementation
from jspec.benches import BUILT_IN, Prompt, load_bench, read_prompts, user_turn
from jspec.checkpoint import Head, load_head, read_config, shipped_head
from jspec.cost.profile import Profile, Setting, setting_of
from jspec.cost.store import ready_profile
from jspec.heads.config import HeadConfig, HeadError, check_kind
from jspec.heads.eagle_config import EagleConfig
from jspec.method import MAX_BUDGET, Method, check_range
from jspec.methods import (
    ar,
    dartree,
    ddtree,
    dflash,
    domino,
    eagle3,
    jetspec,
    prompt_lookup,
    smart,
    token_recycling,
)
from jspec.models.load import Target
from jspec.options import Options
from jspec.sampling import Sampling
from jspec.state import Plan, capacity_for
from jspec.text import usual_budget
from jspec.thresholds.store import ready_graft


class Factory(NamedTuple):
    """How the command line makes a method: with --budget, what it calls --depth and --width, and a head's config."""

    make: Callable[..., Method]
    names: dict[str, str]
    head: type | None = None  # the class of its head's config
    corrected: bool = False  # the head has a correction
    usual: Callable[[bool], int | None] = usual_budget  # by default, with --smart on and without it


def _ar(budget: int) -> Method:
    if budget != 1:
        raise ValueError(f"--method ar has budget 1, got {budget}")
    return ar()


_DEPTH = {"depth": "depth"}
_BOTH = {**_DEPTH, "width": "width"}


def _chain(
    make: Callable[..., Method],
    head_config: HeadConfig,
    budget: int | None = None,
    depth: int | None = None,
) -> Method:
    """With no budget given, a chain as long as the head drafts."""
    if budget is None:
        budget = 1 + (head_config.depth if depth is None else depth)
    return make(head_config, budget, depth)


METHODS = {
    "ar": Factory(_ar, {}, usual=lambda smart: 1),
    "prompt_lookup": Factory(prompt_lookup, {"depth": "depth", "width": "matches"}),
    "token_recycling": Factory(token_recycling, {"depth": "depth", "width": "k"}),
    "jetspec": Factory(jetspec, _BOTH, HeadConfig),
    "dflash": Factory(partial(_chain, dflash), _DEPTH, HeadConfig, usual=lambda smart: None),
    "ddtree": Factory(ddtree, _BOTH, HeadConfig),
    "domino": Factory(partial(_chain, domino), _DEPTH, HeadConfig, True, lambda smart: None),
    "dartree": Factory(dartree, _BOTH, HeadConfig, True),
    "dartree_fixed": Factory(partial(dartree, variant="fixed"), _DEPTH, HeadConfig, True),
    "eagle3": Factory(eagle3, _BOTH, EagleConfig),
}


class Job(NamedTuple):
    """All that a run needs, found to be in order."""

    options: Options
    target: Target
    head: Head | None
    plan: Plan
    prompts: list[Prompt]
    ids: list[list[int]]
    stops: Int32[np.ndarray, "S V"]
    profile: Profile | None = None

    @property
    def params(self) -> dict[str, Any]:
        """What the steps take."""
        params = {"target": self.target.params}
        if self.head is not None:
            params["head"] = self.head.params
        if self.profile is not None:
            params["cost"] = self.profile.cost()
        return params


def make_method(options: Options, target: Target) -> tuple[Head | None, Method]:
    """The head and the method that the options name, whatever is combined with it.

    Raises:
      ValueError: a head that does not fit.
    """
    factory = find_method(options)
    head = load_head(options.head, target) if factory.head else None
    if head is not None:
        check_kind(options.method, head.config, factory.head)
    make = factory.make
    if options.budget is None:
        make = partial(make, budget=factory.usual(options.smart == "on"))
    return head, make(head.config) if head else make()


def make_plan(options: Options, target: Target, sampling: Sampling) -> tuple[Head | None, Plan]:
    """The head and the plan that the options, which name a method, ask for.

    Raises:
      ValueError: a head that does not fit, ``--smart on`` or ``--graft`` where there is nothing to choose, or
        damaged thresholds.
    """
    head, method = make_method(options, target)
    if (retrieve := retrieved(options)) is not None:
        if method.budget == 1:
            raise ValueError(
                f"--graft {options.graft} has no room with a budget of 1: use --graft off"
            )
        names = target.fingerprint, head and head.fingerprint
        method = ready_graft(method, *names, greedy=sampling.greedy, retrieve=retrieve)
    if options.smart == "on":
        if method.budget == 1:
            raise ValueError("--smart on has nothing to choose with a budget of 1: use --smart off")
        method = smart(method)
    attention = attention_of(options)
    return head, Plan(target.config, method, sampling, attention=attention, mesh=target.mesh)


def retrieved(options: Options) -> str | None:
    """What ``graft`` calls the options' --graft; None: nothing is retrieved."""
    return {"off": None, "on": "table"}.get(options.graft, options.graft)


def attention_of(options: Options) -> Implementation | None:
    """What a plan calls the options' --attention."""
    return None if options.attention == "auto" else options.attention


def cost_setting(job: Job, capacity: int) -> Setting:
    """What the cost of a job's rounds depends on."""
    names = job.target.fingerprint, job.head and job.head.fingerprint
    return setting_of(job.plan, job.params, *names, job.options.batch, capacity)


def add_costs(job: Job) -> Job:
    """The job with a cost profile: kept from before, or measured now."""
    capacity = capacity_for(job.plan, max(map(len, job.ids)) + job.options.max_new_tokens)
    profile = ready_profile(job.plan, job.params, cost_setting(job, capacity), stops=job.stops)
    return job._replace(profile=profile)


def choose(options: Options, target: Target) -> Options:
    """The options with a method, and a head for one that has a head: where they name none, what suits the target.

    Raises:
      ValueError: a method that has a head, and none is given or shipped.
    """
    method, head = options.method, options.head
    if method is None:
        name = head or shipped_head(target, causal=True)
        method = "prompt_lookup" if name is None else _suited(name)
    if head is None and (kind := METHODS[method].head):
        head = shipped_head(target, method != "dflash", METHODS[method].corrected, kind)
        if head is None:
            raise ValueError(
                f"--method {method} drafts with a head, and none is shipped for this target: "
                "give one with --head"
            )
    return dataclasses.replace(options, method=method, head=head)


def _suited(head: str) -> str:
    """The method that suits a head; what cannot be read is said when it is loaded."""
    try:
        config = read_config(head)
    except HeadError:
        return "ddtree"
    if isinstance(config, EagleConfig):
        return "eagle3"
    return "ddtree" if config.correction is None else "dartree"


def find_method(options: Options) -> Factory:
    """The method that the options name, with their values; without --budget its ``make`` still takes one.

    Raises:
      ValueError: there is none of that name, or it does not take an option's value.
    """
    if options.method not in METHODS:
        raise ValueError(f"no method {options.method!r}: there are {', '.join(METHODS)}")
    factory = METHODS[options.method]
    if not factory.head and options.head is not None:
        raise ValueError(f"--method {options.method} has no head: leave --head out")
    given = {name: getattr(options, name) for name in ("depth", "width")}
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := given.keys() - factory.names.keys():
        raise ValueError(f"--method {options.method} has no {min(unknown)}: leave it out")
    given = {factory.names[name]: value for name, value in given.items()}
    if options.budget is not None:
        check_range("--budget", options.budget, 1, MAX_BUDGET)
        given["budget"] = options.budget
    return factory._replace(make=partial(factory.make, **given))


def read_all(options: Options) -> list[Prompt]:
    """The prompts that the options ask for.

    Raises:
      ValueError: a bench that isn't there, or a file that cannot be read.
    """
    if options.bench is not None:
        return load_bench(options.bench, options.limit)
    if options.prompts is not None:
        prompts = read_prompts(options.prompts)
    elif options.prompt:
        prompts = [user_turn(str(number), text) for number, text in enumerate(options.prompt, 1)]
    else:
        prompts = list(BUILT_IN)
    return prompts[: options.limit]
