"""Estimates for chips that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cost.estimate import CHIPS, REACHED, START, estimate_profile
from jspec.cost.profile import setting_of
from jspec.cost.table import make_cost
from jspec.methods import ar, prompt_lookup, smart
from jspec.models.transformer import fuse
from jspec.state import Plan
from tests.drafters import by_level


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model()
    text = jnp.arange(300) % 61
    return config, {"target": fuse(config, params), "cost": make_cost([1], [1.0]), "text": text}


def test_few_rows_cost_what_is_read_and_many_what_is_computed(tiny, monkeypatch):
    config, params = tiny
    plan = Plan(config, smart(prompt_lookup(64)), buckets=(1, 64))
    setting = setting_of(plan, params, "t", None, 1, 256)
    found = estimate_profile(plan, params, setting, "v5e")
    assert found.estimate and found.setting.device == "tpu: v5e"
    weights = sum(x.size for x in jax.tree.leaves(params["target"]))
    cache = 2 * config.num_layers * config.num_kv_heads * 256 * config.head_dim
    assert found.verify[0] == pytest.approx(
        4 * (weights + cache) / CHIPS["v5e"].bandwidth / REACHED + START
    )
    slow = CHIPS["v5e"]._replace(flops=1e6)
    monkeypatch.setitem(CHIPS, "v5e", slow)
    bound = estimate_profile(plan, params, setting, "v5e").verify
    work = 2 * (weights - config.vocab_size * config.hidden_size)  # looking a token up is none
    work += 4 * config.num_layers * config.num_heads * config.head_dim * (256 + 64)  # attention
    assert (bound[1] - START) * REACHED * slow.flops == pytest.approx(64 * work, rel=0.3)
    assert bound[1] > 20 * bound[0]
    assert np.isfinite(found.cost().verify).all()


def test_each_level_of_a_drafter_that_has_them_is_a_pass(tiny):
    config, params = tiny
    one_pass, levels = prompt_lookup(8), by_level(3, 2, 0.9, config.vocab_size)
    for method, passes in ((one_pass, [1] * one_pass.needs.depth), (levels, [1, 2, 3])):
        plan = Plan(config, smart(method), buckets=(1, 8))
        setting = setting_of(plan, params, "t", None, 1, 256)
        draft = estimate_profile(plan, params, setting, "v6e").draft
        assert draft == pytest.approx([n * draft[0] for n in passes]) and draft[0] > 0


def test_what_it_refuses(tiny):
    config, params = tiny
    plan = Plan(config, ar())
    setting = setting_of(plan, params, "t", None, 1, 256)
    with pytest.raises(ValueError, match="kind must be one of v4, v5e, v5p, v6e, tpu7x, got 'v9'"):
        estimate_profile(plan, params, setting, "v9")
    with pytest.raises(ValueError, match="method must be one of smart, got ar"):
        estimate_profile(plan, params, setting, "v4")
