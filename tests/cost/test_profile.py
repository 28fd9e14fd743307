"""Profiles on the disk."""

import dataclasses
import json
import os

import numpy as np
import pytest

from jspec.cost import store
from jspec.cost.profile import (
    Profile,
    ProfileError,
    check_setting,
    profile_path,
    read_profile,
    setting_of,
    write_profile,
)
from jspec.cost.store import ready_profile
from jspec.methods import prompt_lookup, smart
from jspec.models.transformer import fuse
from jspec.sampling import Sampling
from jspec.state import Plan


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model()
    return Plan(config, smart(prompt_lookup(4)), buckets=(1, 2)), {"target": fuse(config, params)}


@pytest.fixture
def profile(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    setting = setting_of(*tiny, "abc", None, 1, 256)
    return Profile(setting, (1, 2, 4), (0.03, 0.04, 0.06), (0.1, 0.0, 0.2), (0.001,) * 3, 0.002)


@pytest.fixture
def measured(monkeypatch, profile):
    """Measurements are made up, and counted."""
    made = []

    def measure(plan, params, setting, **options):
        made.append(setting)
        return dataclasses.replace(profile, setting=setting)

    monkeypatch.setattr(store, "measure_profile", measure)
    return made


def test_what_is_written_is_read_again(profile, tmp_path):
    path = tmp_path / "deep" / "one.json"
    write_profile(path, profile)
    assert read_profile(path) == profile
    assert sorted(os.listdir(path.parent)) == ["one.json"]
    found = json.loads(path.read_text())
    assert found["setting"]["batch"] == 1 and found["closed_form"]["rho"] > 0
    cost = profile.cost()
    assert cost.verify.tolist() == pytest.approx(profile.verify)
    assert cost.fit.tolist() == pytest.approx([profile.fit[i] for i in range(4)])
    assert profile.table_errors() == pytest.approx([abs(0.04 / 0.04 - 1)], abs=1e-9)


def test_the_closed_form_is_about_whole_drafts(profile):
    rows = np.asarray(profile.rows)
    rising = dataclasses.replace(profile, draft=(0.001, 0.002, 0.003))
    assert rising.fit.weight == pytest.approx(0.003 * rows.sum() / (rows * rows).sum())


def test_a_setting_is_all_that_counts(tiny, profile):
    plan, params = tiny
    setting = profile.setting
    assert setting.device.startswith("cpu: ") and setting.dtype == "float32"
    assert setting.detail == "ngram 8, matches 8"
    assert setting.buckets == (1, 2, 4) and setting.method == "smart(prompt_lookup)"
    others = [
        setting_of(plan, params, "abd", None, 1, 256),
        setting_of(plan, params, "abc", "head", 1, 256),
        setting_of(plan, params, "abc", None, 2, 256),
        setting_of(plan, params, "abc", None, 1, 512),
        dataclasses.replace(setting, detail="width 9"),
        dataclasses.replace(setting, jax="0.1"),
        dataclasses.replace(setting, device="gpu: 1 x H200"),
    ]
    for sampling in (Sampling(1.0), Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=4, min_p=0.1)):
        noisy = dataclasses.replace(plan, sampling=sampling)
        others.append(setting_of(noisy, params, "abc", None, 1, 256))
    assert others[-1].draw == "noise, top-k, min-p"
    assert len({profile_path(one) for one in [setting, *others]}) == len(others) + 1
    check_setting(profile, setting)
    for other in others:
        with pytest.raises(ProfileError, match="the cost profile was made for"):
            check_setting(profile, other)
    with pytest.raises(ProfileError, match="for batch 1, not for 2"):
        check_setting(profile, others[2])
    with pytest.raises(ProfileError, match=r"for device cpu: .* not for gpu: 1 x H200"):
        check_setting(profile, others[6])
    warm = dataclasses.replace(plan, sampling=Sampling(0.7))  # how warm does not matter
    assert setting_of(warm, params, "abc", None, 1, 256) == others[7]


def damage(profile, path, **changes):
    write_profile(path, profile)
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(found))


DAMAGES = {
    "another version": {"format": 1},
    "rows is": {"rows": [1, 2, "4"]},
    "rows must ascend": {"rows": [1, 4, 2]},
    "rows, buckets and spread": {"rows": [1, 2, 8]},
    "verify_seconds is": {"verify_seconds": [0.1, -0.1, 0.2]},
    "verify must have a time": {"verify_seconds": [0.1]},
    "draft_seconds is": {"draft_seconds": 3},
    "draft must have": {"draft_seconds": []},
    "fixed_seconds is": {"fixed_seconds": None},
    r"fixed_seconds is \[1e": {"fixed_seconds": 1e39},
    "disturbed is": {"disturbed": "no"},
    "rows is ": {"rows": [1, 2, 10**400]},
    "setting.head is": {"setting": "device"},
    "spread do not": {"spread": []},
}


@pytest.mark.parametrize("says", DAMAGES)
def test_damaged_files_are_one_line(profile, tmp_path, says):
    path = tmp_path / "one.json"
    damage(profile, path, **DAMAGES[says])
    if says == "setting.head is":
        damage(profile, path, setting=dataclasses.asdict(profile.setting) | {"head": 3})
    with pytest.raises(ProfileError, match=f"one.json is damaged.*{says}") as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)


def test_more_damage(profile, tmp_path):
    path = tmp_path / "one.json"
    with pytest.raises(ProfileError, match=r"cannot read .*one.json: No such file"):
        read_profile(path)
    write_profile(path, profile)
    whole = path.read_bytes()
    for content in (b"", whole[:-40], b"\xff\xfe", b"[" * 100_000, b"NaN", b"[1]", b"{}"):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match="is damaged"):
            read_profile(path)
    path.write_bytes(b" " * (1 << 20) + whole)
    with pytest.raises(ProfileError, match="too large"):
        read_profile(path)
    missing = dataclasses.asdict(profile.setting)
    del missing["batch"]
    for setting in (missing, {**missing, "batch": 1, "more": 2}, {**missing, "batch": "1"}, 5):
        damage(profile, path, setting=setting)
        with pytest.raises(ProfileError, match="is damaged"):
            read_profile(path)


def test_it_is_measured_once_and_then_read(tiny, profile, measured):
    setting = profile.setting
    first = ready_profile(*tiny, setting)
    again = ready_profile(*tiny, setting)
    assert first == again == profile and measured == [setting]
    ready_profile(*tiny, setting, anew=True)
    other = dataclasses.replace(setting, batch=2)
    ready_profile(*tiny, other)
    assert measured == [setting, setting, other]


def test_damaged_stale_and_estimated_ones_are_made_anew(tiny, profile, measured, capsys):
    setting, path = profile.setting, profile_path(profile.setting)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert ready_profile(*tiny, setting) == profile
    assert capsys.readouterr().err.count("\n") == 1
    stale = dataclasses.replace(profile, setting=dataclasses.replace(setting, jax="0.1"))
    write_profile(path, stale)
    assert ready_profile(*tiny, setting) == profile
    assert "was made for jax 0.1" in capsys.readouterr().err
    write_profile(path, dataclasses.replace(profile, estimate=True))
    assert ready_profile(*tiny, setting) == profile
    assert len(measured) == 3 and read_profile(path) == profile


def test_a_cache_that_cannot_be_written_is_one_line(
    tiny, profile, measured, monkeypatch, capsys, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file"))
    assert ready_profile(*tiny, profile.setting) == profile
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is not kept" in said
