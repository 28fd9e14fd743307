"""What a draft head is: its sizes, what it reads of its target, and whether the two fit."""

import dataclasses
import math
from typing import ClassVar

from jspec.method import MAX_BUDGET
from jspec.models.config import ModelConfig, RopeScaling

_LARGEST = 1 << 30  # sizes are compared and added in 32 bits


class HeadError(ValueError):
    """A head that cannot be served: one line that says what is wrong and what would be right."""


@dataclasses.dataclass(frozen=True)
class Correction:
    """Domino's correction (arXiv 2605.29707): what the drafts before a slot change in its logits. See ``correction``.

    Attributes:
      gru_size: width of the encoder of the path.
      rank: of the projection from slot and path to logits.
      prefix: the first so many drafts are left as the slots have them.

    Raises:
      HeadError: values that no correction can have.
    """

    gru_size: int
    rank: int
    prefix: int = 1

    def __post_init__(self):
        for name, least in {"gru_size": 1, "rank": 1, "prefix": 0}.items():
            if not least <= getattr(self, name) <= _LARGEST:
                raise HeadError(
                    f"the correction's {name} must be in {least}..{_LARGEST}, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """A parallel draft head: JetSpec (arXiv 2606.18394), DFlash (2602.06036) or Domino (2605.29707).

    Static and hashable.

    Attributes:
      hidden_size: the target's too.
      num_kv_heads: divides ``num_heads``.
      head_dim: even.
      block_size: slots of the block it was trained on: the root's and the masked ones.
      causal: a slot of the block sees the slots before it and itself (JetSpec); else all of them (DFlash).
      mask_token_id: whose embedding the drafted slots carry: a token that the target's texts never use.
      taps: 0-based target layers whose outputs it reads, concatenated in this order.
      target_layers: layers of the target it was trained for.
      vocab_size: the target's.
      windows: one a layer: None sees the whole context; w the last w positions, and inside the block too it is
        causal then, whatever ``causal`` says. All windows are of one size.
      draft_vocab_size: tokens it can draft; None: all.
      target_fingerprint: of the target it was trained on, where that is known.
      shift_labels: slot i drafts the token after its own place, so that the root's slot drafts too; else the token at
        its place.
      correction: Domino's; None: a slot's logits stand as they are.

    Raises:
      HeadError: values that no head can have.
    """

    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    causal: bool
    mask_token_id: int
    taps: tuple[int, ...]
    target_layers: int
    vocab_size: int
    windows: tuple[int | None, ...] = ()  # (): no layer has one
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    draft_vocab_size: int | None = None
    target_fingerprint: str | None = None
    shift_labels: bool = False
    correction: Correction | None = None
    called: ClassVar[str] = "a parallel one (JetSpec's, DFlash's or Domino's)"

    def __post_init__(self):
        for field in ("taps", "windows"):  # lists would not be hashable
            object.__setattr__(self, field, tuple(getattr(self, field)))
        check_sizes(self)
        object.__setattr__(self, "windows", self.windows or (None,) * self.num_layers)
        if not 2 <= self.block_size <= MAX_BUDGET:
            raise HeadError(f"block_size must be in 2..{MAX_BUDGET}, got {self.block_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise HeadError(
                f"the mask id must be in the vocabulary 0..{self.vocab_size - 1}, got {self.mask_token_id}"
            )
        if not self.taps:
            raise HeadError("a head needs at least one tapped target layer")
        if bad := [t for t in self.taps if not 0 <= t < self.target_layers]:
            raise HeadError(f"taps must be target layers 0..{self.target_layers - 1}, got {bad[0]}")
        if len(self.windows) != self.num_layers:
            raise HeadError(f"{self.num_layers} layers need as many windows, got {self.windows}")
        sizes = {w for w in self.windows if w is not None}
        if len(sizes) > 1 or not all(1 <= w <= _LARGEST for w in sizes):
            raise HeadError(f"windows must be of one size, in 1..{_LARGEST}, got {self.windows}")

    @property
    def depth(self) -> int:
        """The most tokens it drafts."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot of the block that drafts the token after the root."""
        return 0 if self.shift_labels else 1

    @property
    def stack(self) -> ModelConfig:
        """Its layers as a transformer: those of Qwen3."""
        return ModelConfig(
            arch="qwen3",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn_size,
            norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            tie_embeddings=True,
            qkv_bias=False,
            qk_norm=True,
            max_positions=1 << 30,  # it goes as far as its target
            eos_ids=(),
        )


def check_sizes(config) -> None:
    """Makes sure of what the configs of all heads have in common.

    Raises:
      HeadError: values that no head can have.
    """
    for name in [field.name for field in dataclasses.fields(config) if field.type is int]:
        if not isinstance(value := getattr(config, name), int):
            raise HeadError(f"the head's {name} must be a whole number, got {value!r}")
    sizes = ("hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in (*sizes, "target_layers", "vocab_size"):
        size = getattr(config, name)
        if size is not None and not 1 <= size <= _LARGEST:
            raise HeadError(f"the head's {name} must be in 1..{_LARGEST}, got {size}")
    if config.num_heads % config.num_kv_heads:
        raise HeadError(
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads"
        )
    if config.head_dim % 2:
        raise HeadError(f"the head's head_dim must be even, got {config.head_dim}")
    if not (0 < config.norm_eps < math.inf and 0 < config.rope_theta < math.inf):
        raise HeadError("the head's norm_eps and rope_theta must be positive and finite")
    drafted, vocab = config.draft_vocab_size, config.vocab_size
    if drafted is not None and not 1 <= drafted <= vocab:
        raise HeadError(f"draft_vocab_size must be in 1..{vocab}, got {drafted}")


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers of ``layers``, evenly from 1 to ``layers - 3``: the choice of the DFlash paper.

    Raises:
      HeadError: more taps than there are layers to choose from.
    """
    if count == 1:
        return (layers // 2,)
    if not 1 < count <= layers - 3:
        raise HeadError(
            f"the number of taps must be in 1..{max(1, layers - 3)} for {layers} layers, got {count}"
        )
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def config_for(
    target: ModelConfig,
    *,
    mask_token_id: int,
    taps: tuple[int, ...],
    block_size: int = 8,
    causal: bool = True,
    num_layers: int = 1,
    draft_vocab_size: int | None = None,
    target_fingerprint: str | None = None,
    shift_labels: bool = False,
    correction: Correction | None = None,
) -> HeadConfig:
    """The config of a new head: layers of the target's own sizes, its rope and its norms.

    Raises:
      HeadError: no head can be so.
    """
    return HeadConfig(
        hidden_size=target.hidden_size,
        ffn_size=target.ffn_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        block_size=block_size,
        causal=causal,
        mask_token_id=mask_token_id,
        taps=taps,
        target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        norm_eps=target.norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        draft_vocab_size=draft_vocab_size,
        target_fingerprint=target_fingerprint,
        shift_labels=shift_labels,
        correction=correction,
    )


def check_kind(method: str, config, kind: type) -> None:
    """Makes sure that a method has a head of its kind.

    Args:
      method: its name.
      config: the head's.
      kind: the class of config that it takes.

    Raises:
      HeadError: it is another one.
    """
    if not isinstance(config, kind):
        there = getattr(config, "called", f"a {type(config).__name__}")
        if isinstance(getattr(config, "config", None), kind):
            there += ": give its .config"
        raise HeadError(f"the head of {method} must be {kind.called}, this one is {there}")


def check_pair(config, target: ModelConfig, fingerprint: str | None = None) -> None:
    """Makes sure that a head was made for a target.

    Args:
      config: the head's, of any kind.
      target: the target's.
      fingerprint: the target's; None: not compared.

    Raises:
      HeadError: the first mismatch found.
    """
    for name, theirs in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("target_layers", target.num_layers),
    ):
        if (mine := getattr(config, name)) != theirs:
            what = name.replace("target_layers", "layer count")
            raise HeadError(
                f"the head was made for a target of {what} {mine}, this target's is {theirs}"
            )
    if config.target_fingerprint and fingerprint and config.target_fingerprint != fingerprint:
        raise HeadError(
            f"the head was trained on target {config.target_fingerprint}, this one is {fingerprint}"
        )


__all__ = [
    "Correction",
    "HeadConfig",
    "HeadError",
    "check_kind",
    "check_pair",
    "check_sizes",
    "config_for",
    "spread_taps",
]
