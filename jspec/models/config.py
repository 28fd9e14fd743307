"""What a target is: its architecture and sizes, read from a hub config or from GGUF metadata."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3")
LLAMA3_ORIGINAL_CONTEXT = (
    8192  # of every published llama3-scaled checkpoint; GGUF does not store it
)

_LARGEST = 1 << 20  # above every size of a published target


class TargetError(ValueError):
    """A target that cannot be served: one line that says what is wrong and what would be right."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies of a context longer than the one first trained on.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only the slow ones, those
    with fewer than ``low_freq_factor`` turns in ``original_max_position`` tokens; those with more
    than ``high_freq_factor`` turns stay; between the two, the multiplier goes linearly in the
    number of turns from 1 / factor to 1. (``linear`` ignores these three.)
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = LLAMA3_ORIGINAL_CONTEXT

    def __post_init__(self):
        if not 0 < self.factor < math.inf:
            raise TargetError(f"the factor of rope scaling must be positive, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor or self.original_max_position < 1:
            raise TargetError("rope scaling needs low_freq_factor below high_freq_factor, positive")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the llama family. Static and hashable.

    Attributes:
      arch: "llama", "qwen2" (biases on q, k, v) or "qwen3" (RMS norms on the heads of q and k).
      num_kv_heads: divides ``num_heads``.
      head_dim: even; need not be ``hidden_size // num_heads``.
      tie_embeddings: the output head is the embedding; ``params`` then has no "lm_head".
      max_positions: the context the checkpoint was made for, in tokens.
      eos_ids: tokens that end a generation.
    """

    arch: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    eos_ids: tuple[int, ...]

    def __post_init__(self):
        _known(self.arch)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise TargetError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise TargetError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")


@contextlib.contextmanager
def _understood(what: str):
    """Whatever goes wrong on values of a wrong type is a ``TargetError`` about ``what``."""
    try:
        yield
    except TargetError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TargetError(f"{what} cannot be understood: {error}") from None


@_understood("config.json")
def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The config of a hub-style ``config.json``, with rope keys of transformers 4 or 5.

    Args:
      config: the parsed JSON object.

    Raises:
      TargetError: a size is missing, or the model needs something jspec does not compute.
    """
    arch = _known(config.get("model_type"))
    _refuse_unserved(config)
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    head_dim = config.get("head_dim") or (128 if arch == "qwen3" else hidden // heads)
    max_positions = int(config.get("max_position_embeddings") or 2048)
    theta, scaling = _rope(config, max_positions)
    return _possible(
        arch=arch,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        ffn_size=_size(config, "intermediate_size"),
        norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        max_positions=max_positions,
        eos_ids=as_ids(config.get("eos_token_id")),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` object of a config (transformers 5): ``from_hf(to_hf(c)) == c``."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return {
        "architectures": [f"{config.arch.capitalize()}ForCausalLM"],
        "model_type": config.arch,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "eos_token_id": list(config.eos_ids),
    }


@_understood("the GGUF metadata")
def from_gguf(
    fields: Mapping[str, Any], *, tie_embeddings: bool, rope_divisors: list[float] | None = None
) -> ModelConfig:
    """The config in a GGUF file's metadata.

    Args:
      fields: metadata key to plain Python value.
      tie_embeddings: the file has no separate output matrix.
      rope_divisors: the file's ``rope_freqs`` tensor, [head_dim / 2]: how llama3 scaling is stored.

    Raises:
      TargetError: an unsupported architecture or rope scaling, or missing metadata.
    """
    arch = _known(fields.get("general.architecture"))

    def get(key, default=None):
        value = fields.get(f"{arch}.{key}", default)
        if value is None:
            raise TargetError(f"the GGUF metadata lacks {arch}.{key}")
        return value

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if get("attention.value_length", head_dim) != head_dim:
        raise TargetError("GGUF models whose keys and values differ in width are not supported")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise TargetError("GGUF models with partial rotary embeddings are not supported")
    theta = float(get("rope.freq_base", 10000.0))
    scaling = None
    kind = get("rope.scaling.type", "none")
    if rope_divisors is not None:
        scaling = _llama3_from_divisors(rope_divisors, theta, head_dim)
    elif kind == "linear":
        scaling = RopeScaling("linear", float(get("rope.scaling.factor")))
    elif kind != "none":
        raise TargetError(f"rope scaling {kind!r} is not supported (supported: linear, llama3)")
    eos = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return _possible(
        arch=arch,
        vocab_size=len(fields.get("tokenizer.ggml.tokens", ())) or int(get("vocab_size")),
        hidden_size=hidden,
        num_layers=int(get("block_count")),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        ffn_size=int(get("feed_forward_length")),
        # stored as float32: its shortest decimal is the value meant, 1e-05 and not 9.99999974e-06
        norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=tie_embeddings,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        max_positions=int(get("context_length")),
        eos_ids=tuple(dict.fromkeys(i for e in eos for i in as_ids(e))),
    )


def as_ids(value: Any) -> tuple[int, ...]:
    """Token ids as configs write them: one, several or none.

    Raises:
      TargetError: they are not integers.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise TargetError(f"the end tokens must be integers, got {value!r}")
    return tuple(ids)


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file, or ``default`` where there is no file.

    Raises:
      TargetError: no file and no default, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if default is None:
            raise TargetError(f"{path.parent} has no {path.name}") from None
        return default
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TargetError(f"{path} does not hold a JSON object")
    return value


def _known(arch):
    if arch not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise TargetError(f"architecture {arch!r} is not supported (supported: {supported})")
    return arch


def _size(config, key):
    size = config.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST:
        raise TargetError(f"config.json lacks an integer {key!r} in 1..{_LARGEST}")
    return size


def _number(key, value):
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TargetError(f"{key} in config.json must be a number, got {value!r}")
    return float(value)


def _possible(**values):
    """The config with these values, of a model that can exist."""
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "ffn_size"):
        if values[name] < 1:
            raise TargetError(f"the target's {name} must be 1 or above, got {values[name]}")
    for name in ("norm_eps", "rope_theta", "max_positions"):
        if not 0 < values[name] < math.inf:
            raise TargetError(f"the target's {name} must be positive, got {values[name]}")
    return ModelConfig(**values)


def _refuse_unserved(config):
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise TargetError(f"activation {act!r} is not supported (supported: silu)")
    for key in ("attention_bias", "mlp_bias"):
        # qwen2's biases on q, k and v are implied; the key would add one to the output projection
        if config.get(key):
            raise TargetError(f"{key} is not supported for {config['model_type']}")
    if quantised := config.get("quantization_config"):
        kind = quantised.get("quant_method", "unknown")
        raise TargetError(f"{kind}-quantised safetensors are not supported (GGUF files are)")
    layers = config.get("layer_types") or ()
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in layers):
        raise TargetError("sliding-window attention is not supported")


def _rope(config, max_positions):
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise TargetError("rope parameters that differ between layers are not supported")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise TargetError(f"partial rotary embeddings ({partial}) are not supported")
    theta = next(
        (
            _number("rope_theta", x["rope_theta"])
            for x in (rope, config)
            if x.get("rope_theta") is not None
        ),
        10000.0,
    )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", float(rope["factor"]))
        if kind == "llama3":
            return theta, RopeScaling(
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope.get("original_max_position_embeddings") or max_positions),
            )
    except KeyError as missing:
        raise TargetError(f"{kind} rope scaling needs {missing} in config.json") from None
    raise TargetError(f"rope type {kind!r} is not supported (supported: default, linear, llama3)")


def _llama3_from_divisors(divisors, theta, head_dim):
    """GGUF stores llama3 scaling as divisors only: guess the published constants, then check."""
    scaling = RopeScaling("llama3", float(max(divisors)))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    for i, divisor in enumerate(divisors):
        turns = scaling.original_max_position * theta ** (-2 * i / head_dim) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(1 / divisor, kept + (1 - kept) / scaling.factor, rel_tol=1e-3):
            raise TargetError("the GGUF file's rope_freqs are not those of llama3 scaling")
    return scaling
