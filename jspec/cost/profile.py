"""Measured costs on the disk: readable JSON in the user's cache, one file for each setting that they hold for."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax

from jspec.cost.fit import Fit, fit_cost
from jspec.cost.table import Cost, make_cost
from jspec.device import device_name
from jspec.files import put
from jspec.method import Params
from jspec.models.fetch import cache_dir
from jspec.sampling import Sampling
from jspec.state import Plan

FORMAT = 2
SIZE = 1 << 20  # bytes of a file, at most
MOST = 1e9  # of any number in it


class ProfileError(ValueError):
    """A cost profile that cannot be read, or holds for another setting, in one line."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that a round's cost depends on.

    Attributes:
      device: what computes.
      jax: its version.
      target: fingerprint of the target.
      head: fingerprint of the draft head; None without one.
      dtype: of the target's weights.
      attention: implementation.
      method: its name.
      detail: the method's own.
      budget: most nodes of a tree.
      depth: of its deepest node.
      draw: how tokens are drawn, as far as it costs time.
      batch: slots.
      capacity: cache rows of a slot.
      buckets: rows of the verify forwards.
    """

    device: str
    jax: str
    target: str
    head: str | None
    dtype: str
    attention: str
    method: str
    detail: str
    budget: int
    depth: int
    draw: str
    batch: int
    capacity: int
    buckets: tuple[int, ...]


def setting_of(
    plan: Plan,
    params: Params,
    target: str,
    head: str | None,
    batch: int,
    capacity: int,
) -> Setting:
    """The setting of a decode on this machine.

    Args:
      plan: with the method that drafts.
      params: whose weights' dtype counts.
      target: its fingerprint.
      head: likewise, or None.
      batch: slots.
      capacity: cache rows of a slot.
    """
    return Setting(
        device=f"{jax.default_backend()}: {device_name()}",
        jax=jax.__version__,
        target=target,
        head=head,
        dtype=params["target"]["embed"].dtype.name,
        attention=plan.attention or "auto",
        method=plan.method.name,
        detail=plan.method.detail,
        budget=plan.method.budget,
        depth=plan.method.needs.depth,
        draw=_draw(plan.sampling),
        batch=batch,
        capacity=capacity,
        buckets=plan.row_buckets(batch),
    )


def _draw(sampling: Sampling) -> str:
    if sampling.greedy:
        return "greedy"
    used = {"top-k": sampling.top_k > 0, "top-p": sampling.top_p < 1, "min-p": sampling.min_p > 0}
    return ", ".join(["noise", *(name for name, on in used.items() if on)])


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a round costs in a setting.

    Attributes:
      setting: what it holds for.
      rows: of the verify forwards, ascending.
      verify: seconds of each.
      spread: of the measurements of each, between their quartiles, relative to the median.
      draft: seconds of a draft that took 1, 2, ... passes.
      fixed: seconds of a round that are neither.
      estimate: not measured, but worked out for a device that is not there.
      disturbed: see ``jspec.cost.measure.Measured``.
    """

    setting: Setting
    rows: tuple[int, ...]
    verify: tuple[float, ...]
    spread: tuple[float, ...]
    draft: tuple[float, ...]
    fixed: float
    estimate: bool = False
    disturbed: float = 0.0

    @property
    def fit(self) -> Fit:
        """The paper's closed form."""
        return fit_cost(self.rows, self.verify, self.draft[-1])

    def cost(self) -> Cost:
        """What goes into ``params["cost"]``."""
        fit = self.fit
        form = (fit.weight, fit.gamma, fit.delta, fit.rho)
        return make_cost(self.rows, self.verify, self.draft, self.fixed, form)

    def table_errors(self) -> list[float]:
        """How far each inner entry is from what its neighbours say: what interpolation is worth."""
        errors = []
        for at in range(1, len(self.rows) - 1):
            low, mid, high = self.rows[at - 1 : at + 2]
            part = (mid - low) / (high - low)
            said = self.verify[at - 1] + part * (self.verify[at + 1] - self.verify[at - 1])
            errors.append(abs(said / self.verify[at] - 1))
        return errors


def check_setting(profile: Profile, setting: Setting, name: str = "the cost profile") -> None:
    """Makes sure that a profile holds for a setting.

    Raises:
      ProfileError: it does not; what differs is named.
    """
    for field in dataclasses.fields(Setting):
        was, is_now = getattr(profile.setting, field.name), getattr(setting, field.name)
        if was != is_now:
            raise ProfileError(f"{name} was made for {field.name} {was}, not for {is_now}")


def profile_path(setting: Setting) -> Path:
    """Where the user's cache keeps the profile of a setting."""
    text = json.dumps(dataclasses.asdict(setting), sort_keys=True)
    return cache_dir() / "cost" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def write_profile(path: Path, profile: Profile) -> None:
    """Writes a profile, all of it or nothing.

    Raises:
      OSError: it cannot be written.
    """
    fit = profile.fit
    found = {
        "format": FORMAT,
        "setting": dataclasses.asdict(profile.setting),
        "estimate": profile.estimate,
        "rows": profile.rows,
        "verify_seconds": profile.verify,
        "spread": profile.spread,
        "draft_seconds": profile.draft,
        "fixed_seconds": profile.fixed,
        "disturbed": profile.disturbed,
        "closed_form": {"lambda": fit.weight, **{k: getattr(fit, k) for k in fit._fields[1:]}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    put(path, lambda file: file.write(text.encode()), shared=True)


def read_profile(path: Path) -> Profile:
    """Reads a profile.

    Raises:
      ProfileError: it is not there, damaged, or of another version of this format.
    """
    try:
        with path.open("rb") as file:
            text = file.read(SIZE + 1)
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) > SIZE:
        raise ProfileError(f"{path} is no cost profile: it is too large")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ProfileError(f"{path} is damaged: it is no JSON") from None
    try:
        return _profile(found)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ProfileError(f"{path} is damaged or of another version: {reason}") from None


def _profile(found: Any) -> Profile:
    if not isinstance(found, dict) or found["format"] != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    said = dict(found["setting"])
    kinds = {"buckets": list, "budget": int, "depth": int, "batch": int, "capacity": int}
    for field in dataclasses.fields(Setting):
        kind = kinds.get(field.name, str)
        value = said[field.name]
        if not (isinstance(value, kind) or (field.name == "head" and value is None)):
            raise ValueError(f"setting.{field.name} is {value!r}")
    if unknown := said.keys() - {field.name for field in dataclasses.fields(Setting)}:
        raise ValueError(f"setting has {min(unknown)!r}")
    said["buckets"] = tuple(_numbers("setting.buckets", said["buckets"], int))
    profile = Profile(
        setting=Setting(**said),
        rows=tuple(_numbers("rows", found["rows"], int)),
        verify=tuple(_numbers("verify_seconds", found["verify_seconds"])),
        spread=tuple(_numbers("spread", found["spread"])),
        draft=tuple(_numbers("draft_seconds", found["draft_seconds"])),
        fixed=_numbers("fixed_seconds", [found["fixed_seconds"]])[0],
        estimate=found["estimate"] is True,
        disturbed=_numbers("disturbed", [found["disturbed"]])[0],
    )
    make_cost(profile.rows, profile.verify, profile.draft, profile.fixed)
    if profile.rows != profile.setting.buckets or len(profile.spread) != len(profile.rows):
        raise ValueError("rows, buckets and spread do not belong together")
    return profile


def _numbers(name, values, kind=(int, float)):
    def fits(x):
        return isinstance(x, kind) and not isinstance(x, bool) and 0 <= x < MOST

    if not isinstance(values, list) or not all(map(fits, values)):
        raise ValueError(f"{name} is {str(values)[:80]}")
    return values if kind is int else [float(x) for x in values]
