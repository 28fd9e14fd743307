"""What a generation must not do on an accelerator: talk to the host, or hold two copies of its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decode import generate
from jspec.heads.config import config_for
from jspec.heads.parallel import init_head
from jspec.methods import ar, ddtree, dflash, jetspec, prompt_lookup, token_recycling
from jspec.models.transformer import fuse
from jspec.prefill import admit
from jspec.sampling import Sampling
from jspec.state import Plan, new_state

HEADED = {jetspec: True, dflash: False, ddtree: True}
TO_HOST = ("callback", "infeed", "outfeed", "sendtohost", "recvfromhost", "stablehlo.send")


def prepared(tiny_model, factory, prompts=2):
    config, weights = tiny_model()
    params = {"target": fuse(config, weights)}
    if factory in HEADED:
        head = config_for(
            config, mask_token_id=60, taps=(0, 1), block_size=5, causal=HEADED[factory]
        )
        params["head"] = init_head(head, jax.random.key(1))
        method = factory(head, 8)
    else:
        method = ar() if factory is ar else factory(8)
    plan = Plan(config, method, Sampling(0.7), buckets=(1, 8))
    state = new_state(plan, params, prompts, 64, jax.random.key(0))
    for slot in range(prompts):
        state = admit(plan, params, state, slot, [3 + slot, 5, 7], slot, 6)
    return plan, params, state


def test_the_guard_guards():
    """A NumPy argument is a transfer that it sees, and so is a read."""
    double = jax.jit(lambda x: 2 * x)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):
        double(np.ones(3))


@pytest.mark.parametrize("factory", [ar, prompt_lookup, token_recycling, *HEADED])
def test_a_generation_stays_on_the_device(tiny_model, factory):
    plan, params, state = prepared(tiny_model, factory)
    lowered = generate.lower(plan, params, state)
    text = lowered.as_text().lower()
    assert not [word for word in TO_HOST if word in text]
    before = jax.tree.leaves(state)
    cached = sum(x.nbytes for x in (*state.cache.keys, *state.cache.values))
    assert lowered.compile().memory_analysis().alias_size_in_bytes >= cached
    with jax.transfer_guard("disallow_explicit"):
        after = generate(plan, params, state)
    assert all(x.is_deleted() for x in before)
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, after)))
    assert jnp.all(after.rows.done)
    np.testing.assert_array_equal(after.cache.length, [8, 8])
