"""The kinds of heads there are, and which module serves which.

The modules of a kind have functions of the same names: ``init_head``, ``trained``, ``with_draft_ids`` and
``block_hidden`` in its own, ``config_to_json``, ``tensor_shapes``, ``to_tensors``, ``read_arrays`` and ``from_tensors``
in that of its published layout.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jspec.heads import eagle, eagle_published, parallel, published
from jspec.heads.config import HeadConfig, check_pair
from jspec.heads.eagle_config import EagleConfig, paired
from jspec.models.load import Target

AnyConfig = HeadConfig | EagleConfig


def code_of(config: AnyConfig) -> ModuleType:
    """The module that computes a head."""
    return eagle if isinstance(config, EagleConfig) else parallel


def layout_of(config: AnyConfig) -> ModuleType:
    """The module that reads and writes a head as it is published."""
    return eagle_published if isinstance(config, EagleConfig) else published


def config_from_json(data: Mapping[str, Any]) -> AnyConfig:
    """The config of a head's ``config.json``, of whichever kind it is.

    Raises:
      HeadError: as the reader of that kind.
    """
    layout = eagle_published if eagle_published.is_eagle(data) else published
    return layout.config_from_json(data)


def pair(config: AnyConfig, target: Target) -> AnyConfig:
    """The config of a head that was made for a target, with what a published one leaves to its target.

    Raises:
      HeadError: it was made for another target.
    """
    if isinstance(config, EagleConfig):
        config = paired(config, target.config)
    check_pair(config, target.config, target.fingerprint)
    return config


__all__ = ["AnyConfig", "code_of", "config_from_json", "layout_of", "pair"]
