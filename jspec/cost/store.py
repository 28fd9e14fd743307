"""A profile for the decode at hand: from the user's cache, or measured and kept there."""

import sys

import numpy as np
from jaxtyping import Int

from jspec.cost.measure import DISTURBED, measure_profile
from jspec.cost.profile import (
    Profile,
    ProfileError,
    Setting,
    check_setting,
    profile_path,
    read_profile,
    write_profile,
)
from jspec.method import Params
from jspec.state import Plan

TINY = 3e-3  # seconds of a forward, below which nobody minds that times are noise


def ready_profile(
    plan: Plan,
    params: Params,
    setting: Setting,
    *,
    stops: Int[np.ndarray, "states V"] | None = None,
    anew: bool = False,
    seconds: float | int = 20.0,
) -> Profile:
    """The profile of a setting; where the cache has none, or a damaged or stale one, it is measured.

    A cache that cannot be written is one line on stderr: the profile then holds for this process. So is a measurement
    that was disturbed.

    Args:
      plan: its method is one of ``smart``.
      params: as decoding takes them.
      setting: of ``jspec.cost.profile.setting_of``.
      stops: see ``measure_cost``.
      anew: measure in any case.
      seconds: see ``measure_cost``.
    """
    path = profile_path(setting)
    if path.exists() and not anew:
        try:
            found = read_profile(path)
            check_setting(found, setting, str(path))
            if not found.estimate:
                return found
        except ProfileError as error:
            print(f"jspec: {error}: it is measured anew", file=sys.stderr)
    profile = measure_profile(plan, params, setting, stops=stops, seconds=seconds)
    if profile.disturbed > DISTURBED and profile.verify[0] > TINY:
        off = f"{100 * profile.disturbed:.0f} %"
        print(
            f"jspec: measuring costs was disturbed: times off by {off}; for better ones run python -m jspec.cost",
            file=sys.stderr,
        )
    try:
        write_profile(path, profile)
    except OSError as error:
        print(f"jspec: the cost profile is not kept: {error}", file=sys.stderr)
    return profile
