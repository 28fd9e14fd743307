"""What an EAGLE-3 head is: its sizes, and what it reads of its target."""

import dataclasses
from typing import ClassVar

from jspec.heads.config import HeadError, check_sizes
from jspec.method import MAX_BUDGET
from jspec.models.config import ModelConfig, RopeScaling

STEPS = 7  # of the published training-time test


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """An autoregressive draft head of one layer: EAGLE-3 (arXiv 2503.01840). Static and hashable.

    With the final normed state as its only tap and ``own_output`` false it drafts from what EAGLE-2 (arXiv 2406.16858)
    drafts from, with the target's output rows; its layer stays that of EAGLE-3.

    Attributes:
      hidden_size: the target's too.
      num_kv_heads: divides ``num_heads``.
      head_dim: even.
      vocab_size: the target's.
      taps: 0-based target layers whose outputs it reads, concatenated in this order; ``target_layers`` is the final
        normed state. (): the published three, which depend on the target; see ``paired``.
      target_layers: layers of the target it was trained for; None: a published head does not say.
      steps: unrolled steps of its training-time test; it can be asked to draft deeper.
      draft_vocab_size: tokens it can draft; None: all.
      own_output: it has output rows of its own; else they are the target's.
      norm_before_residual: the residual stream of the layer begins with the normed features.
      target_fingerprint: of the target it was trained on, where that is known.

    Raises:
      HeadError: values that no head can have.
    """

    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    taps: tuple[int, ...] = ()
    target_layers: int | None = None
    steps: int = STEPS
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    draft_vocab_size: int | None = None
    own_output: bool = True
    norm_before_residual: bool = False
    target_fingerprint: str | None = None
    called: ClassVar[str] = "one of EAGLE-3's"
    correction: ClassVar[None] = None  # Domino's: what it drafts depends on the path as it is

    def __post_init__(self):
        object.__setattr__(self, "taps", tuple(self.taps))  # a list would not be hashable
        check_sizes(self)
        if not 1 <= self.steps < MAX_BUDGET:
            raise HeadError(f"steps must be in 1..{MAX_BUDGET - 1}, got {self.steps}")
        last = self.target_layers
        if bad := [t for t in self.taps if t < 0 or (last is not None and t > last)]:
            most = "" if last is None else last
            raise HeadError(f"taps must be target layers 0..{most}, got {bad[0]}")

    @property
    def num_layers(self) -> int:
        """Its own layers."""
        return 1

    @property
    def depth(self) -> int:
        """The tokens after an anchor that it is trained to draft."""
        return self.steps

    @property
    def tap_count(self) -> int:
        """How many states of the target it reads of each token."""
        return len(self.taps) or 3

    @property
    def stack(self) -> ModelConfig:
        """Its layer as a transformer's: llama's, but for what its attention reads."""
        return ModelConfig(
            arch="llama",
            vocab_size=self.draft_vocab_size or self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn_size,
            norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            tie_embeddings=not self.own_output,
            qkv_bias=False,
            qk_norm=False,
            max_positions=1 << 30,  # it goes as far as its target
            eos_ids=(),
        )


def published_taps(layers: int) -> tuple[int, int, int]:
    """What published heads read of a target of so many layers: the streams that enter layers 2, half way, and L - 3.

    Raises:
      HeadError: a target with too few layers.
    """
    if layers < 5:
        raise HeadError(f"EAGLE-3's taps need a target of 5 layers or more, this one has {layers}")
    return (1, layers // 2 - 1, layers - 4)


def paired(config: EagleConfig, target: ModelConfig) -> EagleConfig:
    """The config with what a published head leaves to its target: its taps and the target's number of layers.

    Raises:
      HeadError: taps beyond the target, or one with too few layers.
    """
    layers = config.target_layers or target.num_layers
    taps = config.taps or published_taps(layers)
    return dataclasses.replace(config, taps=taps, target_layers=layers)


def eagle_config_for(
    target: ModelConfig,
    *,
    taps: tuple[int, ...] = (),
    steps: int = STEPS,
    draft_vocab_size: int | None = None,
    own_output: bool = True,
    target_fingerprint: str | None = None,
) -> EagleConfig:
    """The config of a new head: a layer of the target's own sizes, its rope and its norms.

    Raises:
      HeadError: no head can be so.
    """
    config = EagleConfig(
        hidden_size=target.hidden_size,
        ffn_size=target.ffn_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        taps=taps,
        steps=steps,
        norm_eps=target.norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        draft_vocab_size=draft_vocab_size,
        own_output=own_output,
        target_fingerprint=target_fingerprint,
    )
    return paired(config, target)


__all__ = ["STEPS", "EagleConfig", "eagle_config_for", "paired", "published_taps"]
