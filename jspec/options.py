"""The options of ``python -m jspec.run``, and how they are read from the command line and from YAML."""

import argparse
import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jsonargparse
import yaml

from jspec.benches import BENCHES, is_text
from jspec.device import Accel, Dtype
from jspec.mesh import parse_mesh
from jspec.models.load import DEFAULT_TARGET

Switch = Literal["on", "off"]
Graft = Literal["on", "off", "text", "both"]
Attention = Literal["auto", "xla", "pallas"]
MAX_BATCH = 1024
ONE_DEVICE = "data=1,model=1"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to decode, with what, and what to write about it; each field's annotation is its help.

    Raises:
      ValueError: an option out of range, one that asks for what is not there yet, or two that exclude each other.
    """

    accel: Annotated[Accel, "where to run"] = "auto"
    target: Annotated[str, f"{DEFAULT_TARGET}, a directory, a .gguf file or a hub id"] = (
        DEFAULT_TARGET
    )
    dtype: Annotated[Dtype, "of weights and cache; auto: fp32 on a CPU, else bf16"] = "auto"
    attention: Annotated[
        Attention, "pallas: a kernel, of TPUs and of Hopper GPUs; auto: on a TPU pallas, else xla"
    ] = "auto"
    mesh: Annotated[
        str, "devices: data, parts that the batch falls into; model, parts of heads and weights"
    ] = ONE_DEVICE
    distributed: Annotated[
        bool, "one process of several, each with this command: joins them (jax.distributed)"
    ] = False
    method: Annotated[
        str | None,
        "who drafts: ar, prompt_lookup, token_recycling, jetspec, dflash, ddtree, domino, dartree, dartree_fixed "
        "or eagle3; default: what suits the head, ddtree, dartree or eagle3; without one prompt_lookup",
    ] = None
    head: Annotated[
        str | None,
        "of jetspec, dflash and ddtree, of domino and dartree, which need one with a correction, and of eagle3: a "
        "shipped draft head's name, a head's directory or a hub id; default: the shipped one that was trained on the "
        "target, of dflash the bidirectional, else the causal one",
    ] = None
    budget: Annotated[
        int | None,
        "nodes of a tree, root included; default: 4 on a CPU, else 32 (dflash and domino: the head's block), "
        "with --smart on 32",
    ] = None
    depth: Annotated[int | None, "of a tree, at most; default: the method's"] = None
    width: Annotated[
        int | None,
        "matches of prompt_lookup, successors of token_recycling, children of a node of jetspec and "
        "eagle3, candidates of a slot of ddtree, nodes of a depth of dartree; default: the method's",
    ] = None
    smart: Annotated[
        Switch, "on: verify only the nodes that pay; measures the machine the first time"
    ] = "off"
    graft: Annotated[
        Graft,
        "retrieved tokens where the drafter is unsure, by python -m jspec.thresholds: on, from a table of the target's "
        "second thoughts; text, from earlier matches; both",
    ] = "off"
    temperature: Annotated[float, "0: always the likeliest token"] = 0.0
    top_p: Annotated[float, "in (0, 1]; 1 is off"] = 1.0
    top_k: Annotated[int, "0 is off"] = 0
    min_p: Annotated[float, "in [0, 1]; 0 is off"] = 0.0
    seed: Annotated[int, "of the draws"] = 0
    max_new_tokens: Annotated[int, "of each answer"] = 128
    stop: Annotated[tuple[str, ...], "texts that end an answer"] = ()
    batch: Annotated[int, "prompts decoded at a time"] = 1
    prompt: Annotated[tuple[str, ...], "prompts, each a user's message"] = ()
    prompts: Annotated[
        str | None,
        'JSON lines, each {"id", "prompt"}, {"id", "messages"} or {"id", "text"} (raw)',
    ] = None
    bench: Annotated[str | None, f"the prompts of {', '.join(BENCHES)}"] = None
    limit: Annotated[int | None, "only the first so many prompts"] = None
    baseline: Annotated[bool, "decode autoregressively too, and compare"] = True
    json: Annotated[str | None, "write the report there"] = None
    tree: Annotated[bool, "draw the first trees drafted"] = False
    profile: Annotated[bool, "run and time the steps of a round one by one"] = False

    def __post_init__(self):
        at_least = {"max_new_tokens": 1, "batch": 1, "limit": 1, "depth": 1, "width": 1, "seed": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{_flag(name)} must be {least} or above, got {value}")
        if self.batch > MAX_BATCH:
            raise ValueError(f"--batch must be at most {MAX_BATCH}, got {self.batch}")
        if self.seed >= 1 << 32:
            raise ValueError(f"--seed must be below 2**32, got {self.seed}")
        given = {"prompt": self.prompt, "stop": self.stop, "target": (self.target,)}
        for name, texts in given.items():
            if not all(map(is_text, texts)):
                raise ValueError(f"{_flag(name)} has bytes that are not UTF-8")
        if not self.target:
            raise ValueError(f"--target must not be empty: its default is {DEFAULT_TARGET}")
        if "" in self.stop:
            raise ValueError("--stop must not be empty: it would end every answer at once")
        if sum(map(bool, (self.prompt, self.prompts is not None, self.bench is not None))) > 1:
            raise ValueError("--prompt, --prompts and --bench exclude each other: give one of them")
        data, _ = parse_mesh(self.mesh)
        if self.batch % data:
            raise ValueError(f"--mesh data={data} does not divide --batch {self.batch}")
        if self.smart == "on" and self.mesh != ONE_DEVICE:
            raise ValueError(f"--smart on takes one device: leave --mesh {self.mesh} out")


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What other commands take to make a method as ``python -m jspec.run`` would."""

    accel: Annotated[Accel, "where to run"] = "auto"
    target: Annotated[str, f"{DEFAULT_TARGET}, a directory, a .gguf file or a hub id"] = (
        DEFAULT_TARGET
    )
    dtype: Annotated[Dtype, "of weights and cache; auto: fp32 on a CPU, else bf16"] = "auto"
    method: Annotated[
        str | None,
        "who drafts, as python -m jspec.run takes it; default: what suits the head, without one prompt_lookup",
    ] = None
    head: Annotated[str | None, "a shipped draft head's name or a head's directory"] = None
    budget: Annotated[int | None, "most nodes of a tree, root included"] = None
    depth: Annotated[int | None, "of a tree, at most; default: the method's"] = None
    width: Annotated[int | None, "as python -m jspec.run takes it"] = None
    temperature: Annotated[float, "0: no noise is drawn"] = 0.0

    def run_options(self, **changes) -> Options:
        """What ``python -m jspec.run`` would be given to decode so."""
        names = {field.name for field in dataclasses.fields(Options)}
        mine = {k: v for k, v in dataclasses.asdict(self).items() if k in names}
        return Options(**{**mine, **changes})


def exit_status(work: Callable[[], None]) -> int:
    """Runs a command: 0, 2 with one line for a user's error or a full disk or memory, 130 for Ctrl-C."""
    try:
        work()
    except (ValueError, OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
        print(f"jspec: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def say(line: str) -> None:
    """Tells a user on stderr what a command is about to spend time on."""
    if sys.stderr is not None:
        print(f"jspec: {line}", file=sys.stderr, flush=True)


class Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are ``ValueError``s of one line.

    Attributes:
      dash: what flags have where names have underscores.
    """

    dash = "-"

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **keywords: Any) -> Any:
        """As the library does; dashes and underscores mean the same in an option's name."""
        args = sys.argv[1:] if args is None else args
        return super().parse_args([self._spelled(arg) for arg in args], *more, **keywords)

    def _spelled(self, arg):
        name, is_, value = arg.partition("=")
        if not name.startswith("--"):
            return arg
        respelled = "--" + re.sub("[-_]", self.dash, name[2:])
        known = self._option_string_actions
        return respelled + is_ + value if name not in known and respelled in known else arg

    def error(self, message: str, ex: Exception | None = None) -> typing.NoReturn:
        """Raises the error."""
        line = one_line(message, self.dash)
        wrong = re.search(r"[Uu]nrecognized arguments: (--[\w.-]+)", line)
        if wrong and (near := difflib.get_close_matches(wrong[1], self._option_string_actions, 1)):
            line = f"{line} (is {near[0]} meant?)"
        raise ValueError(line)


_load_yaml = jsonargparse.get_loader("yaml")


def _load(text: str) -> Any:
    """YAML without doubled keys, and without aliases: the library does not come back from one that holds itself."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise yaml.YAMLError("a config file must not have aliases (*name)")
    nodes = [yaml.compose(text, yaml.SafeLoader)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            given = [str(key.value) for key, value in node.value if value.value]
            if stage := next((name for name in given if name.isupper()), None):
                raise yaml.YAMLError(f"{stage} belongs on the command line, not into a config file")
            if twice := {name for name in names if names.count(name) > 1}:
                raise yaml.YAMLError(f"{min(twice)} stands twice in a config file")
            nodes += [value for _, value in node.value]
    loaded = _load_yaml(text)
    if not isinstance(loaded, dict):
        return loaded
    # --print_config writes positional arguments too, as empty ones.
    return {name: value for name, value in loaded.items() if not str(name).isupper()}


jsonargparse.set_loader("yaml", _load, (yaml.YAMLError,))


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options on a command line; with ``--config FILE.yaml`` those in the file, where the line does not override.

    Raises:
      ValueError: an unknown option or a value of another type; or what ``Options`` refuses.
    """
    said = "Decodes prompts with tree-based speculative decoding."
    return parse_into(Options, argv, "python -m jspec.run", said)


def parse_into(kind: type, argv: Sequence[str] | None, program: str, description: str) -> Any:
    """The options of a command, as ``parse`` reads them, in a dataclass of any kind.

    Args:
      kind: its fields are annotated with a type and a help text.
      argv: the command line; None: the process's own.
      program: how it is called.
      description: what it does.

    Raises:
      ValueError: an unknown option or a value of another type; or what ``kind`` refuses.
    """
    parser = Parser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help="options in YAML")
    for field in dataclasses.fields(kind):
        _add(parser, field)
    try:
        chosen = parser.parse_args(argv)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        # jsonargparse trips over YAML of another shape than it expects
        raise ValueError(one_line(str(error))) from None
    values = {}
    for field in dataclasses.fields(kind):
        value = chosen[field.name]
        if value is None and field.default is not None:
            raise ValueError(f"{_flag(field.name)} must not be null: leave it out")
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _add(parser: Parser, field: dataclasses.Field) -> None:
    kind, help = typing.get_args(field.type)
    keywords: dict[str, Any] = {"help": help, "default": field.default}
    if kind is bool:
        keywords["action"] = jsonargparse.ActionYesNo(no_prefix="no-")
    elif typing.get_origin(kind) is tuple:
        keywords |= {"type": str, "nargs": "+", "metavar": "TEXT"}
    elif isinstance(kind, types.UnionType):  # X | None
        keywords["type"] = typing.get_args(kind)[0]
    elif _is_switch(kind):
        words = typing.get_args(kind)
        keywords |= {"type": _switch(words), "metavar": f"{{{','.join(words)}}}"}
    else:
        keywords["type"] = kind
    parser.add_argument(_flag(field.name), **keywords)


def _is_switch(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal and "on" in typing.get_args(kind)


class _WrongWord(argparse.ArgumentTypeError, ValueError):
    """What the command line's parser shows as it is, and the config file's too."""


def _switch(words: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value):
        if isinstance(value, bool):
            value = "on" if value else "off"  # what YAML makes of them
        if value not in words:
            wanted = f"{', '.join(words[:-1])} or {words[-1]}"
            raise _WrongWord(f"expected {wanted}, got {value}")
        return value

    return read


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_KINDS = {
    "<class 'bool'>": "on or off",
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a finite number",
    "<class 'str'>": "text",
    "<class 'tuple'>": "a list",
}


# what jsonargparse says of a text, a number or a mapping where a list should be
_NO_LIST = ("does not support item assignment", "is not iterable", "changed size during iteration")


def one_line(message: str, dash: str = "-") -> str:
    """jsonargparse's message, in one line and in the words of the command line.

    Args:
      message: what it says.
      dash: see ``Parser``.
    """
    line = " ".join(message.split()).removeprefix("argument ")
    if any(says in line for says in _NO_LIST):
        return "in a config file, prompt and stop must be lists"
    if key := re.fullmatch(r'Parser key "([\w.]+)":? (.*)', line):
        line = f"--{key[1].replace('_', dash)}: {key[2]}"
    # X | None: what is said of X, but for the value
    union = r"(.*) Does not validate .* Errors: - (Expected a .*?) - .* Given value: (.*)"
    if either := re.fullmatch(union, line):
        line = f"{either[1]} {either[2]}. Got value: {either[3]}"
    if kind := re.fullmatch(r"(.*) Expected a (.*)\. Got value: (.*)", line):
        choices = ", ".join(re.findall(r"'([^']+)'", kind[2]))
        wanted = _KINDS.get(kind[2]) or f"one of {choices}"
        line = f"{kind[1]} expected {wanted}, got {kind[3]}"
    return line
