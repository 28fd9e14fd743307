"""Keys of a head's config.json that all published layouts share."""

from collections.abc import Mapping
from typing import Any

from jspec.heads.config import HeadError


def is_int(value: Any) -> bool:
    """Whether JSON has a whole number there: True is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer_of(keys: Mapping[str, Any], name: str) -> int:
    """The whole number of that name.

    Raises:
      HeadError: there is none.
    """
    value = keys.get(name)
    if not is_int(value):
        raise HeadError(f"config.json needs an integer {name}, got {value!r}")
    return value


def fingerprint_of(keys: Mapping[str, Any]) -> str | None:
    """The target that a head was trained on, where it says so.

    Raises:
      HeadError: it is no text.
    """
    fingerprint = keys.get("target_fingerprint")
    if not isinstance(fingerprint, str | None):
        raise HeadError(f"target_fingerprint in config.json must be text, got {fingerprint!r}")
    return fingerprint


def rope_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What ``jspec.models.config.to_hf`` says of rope, as published heads do."""
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    plain = scaling["rope_type"] == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}
