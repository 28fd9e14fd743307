import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.train.losses import Corrected, LossConfig, base_share, block_loss

V, H, R, A, D = 11, 6, 5, 3, 4


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    labels = rng.integers(0, V, (A, D))
    labels[0, 2:] = -1
    labels[2] = -1
    return normal(V, H), normal(H, A * D), labels, normal(H, A * D)


def log_softmax(z):
    z = z - z.max(0)
    return z - np.log(np.exp(z).sum(0))


def slow(loss, output, hidden, labels, teacher):
    """Slot by slot, in float64."""
    q, p = log_softmax(output @ hidden), log_softmax(output @ teacher)
    total = weight_sum = 0.0
    hits = np.zeros(D)
    for a in range(A):
        slots = [k for k in range(D) if labels[a, k] >= 0]
        chance = [np.exp(q[labels[a, k], a * D + k]) for k in slots]
        for k in slots:
            column = a * D + k
            hits[k] += q[:, column].argmax() == labels[a, k]
            t = p[:, column]
            if loss.teacher_top_k:
                least = np.sort(t)[-loss.teacher_top_k]
                t = np.where(t >= least, t, -np.inf)
                t = t - np.log(np.exp(t).sum())
            if loss.kind == "ce":
                value = -q[labels[a, k], column]
            elif loss.kind == "fkl":
                value = sum(np.exp(x) * (x - y) for x, y in zip(t, q[:, column]) if x > -np.inf)
            else:
                value = sum(np.exp(y) * (y - max(x, -20)) for x, y in zip(t, q[:, column]))
            weight = np.exp(-k / loss.gamma) if loss.gamma else 1.0
            if loss.dpace is not None:
                s = [(1 - loss.dpace) * c + loss.dpace for c in chance]
                weight *= sum(np.prod(s[: m + 1]) for m in range(k, len(slots)))
            total, weight_sum = total + weight * value, weight_sum + weight
    return total / weight_sum, hits


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(),
        LossConfig(gamma=2.0, chunk=5),
        LossConfig("fkl", chunk=7),
        LossConfig("fkl", gamma=4.0, teacher_top_k=3),
        LossConfig("rkl"),
        LossConfig("rkl", teacher_top_k=4),
        LossConfig(dpace=0.5),
        LossConfig(dpace=0.0, gamma=3.0),
    ],
    ids=str,
)
def test_losses_equal_the_slow_ones(loss):
    output, hidden, labels, teacher = arrays()
    wide = [jnp.asarray(x, jnp.float32) for x in (output, hidden, teacher)]
    value, said = block_loss(loss, wide[0], wide[1], jnp.asarray(labels), wide[2])
    expected, hits = slow(loss, output, hidden, labels, teacher)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_equal(np.asarray(said["hits"]), hits)
    np.testing.assert_equal(np.asarray(said["slots"]), (labels >= 0).sum(0))


@pytest.mark.parametrize("loss", [LossConfig(gamma=2.0), LossConfig("fkl"), LossConfig("rkl")])
def test_gradients_are_those_of_finite_differences_and_slots_without_a_label_have_none(loss):
    output, hidden, labels, teacher = arrays(1)
    as_float = [jnp.asarray(x, jnp.float32) for x in (output, hidden, teacher)]

    def value(hidden):
        return block_loss(loss, as_float[0], hidden, jnp.asarray(labels), as_float[2])[0]

    found = np.asarray(jax.grad(value)(as_float[1]))
    rng = np.random.default_rng(2)
    for _ in range(5):
        step = rng.normal(size=hidden.shape) * 1e-5
        high = slow(loss, output, hidden + step, labels, teacher)[0]
        low = slow(loss, output, hidden - step, labels, teacher)[0]
        np.testing.assert_allclose((found * step).sum(), (high - low) / 2, rtol=2e-3, atol=1e-9)
    empty = (labels < 0).reshape(-1)
    assert not found[:, empty].any() and np.abs(found[:, ~empty]).max() > 0


@pytest.mark.parametrize("loss", [LossConfig(gamma=2.0, chunk=5), LossConfig("fkl", gamma=4.5)])
def test_output_rows_that_are_trained_have_a_gradient_too(loss):
    output, hidden, labels, teacher = arrays(3)
    fixed = np.random.default_rng(4).normal(size=output.shape)  # the teacher's own rows
    wide = [jnp.asarray(x, jnp.float32) for x in (output, hidden, teacher, fixed)]

    def value(output, hidden, train):
        kinds = {"teacher_output": wide[3], "train_output": train}
        return block_loss(loss, output, hidden, jnp.asarray(labels), wide[2], **kinds)[0]

    free, frozen = (jax.value_and_grad(value, (0, 1))(*wide[:2], train) for train in (True, False))
    np.testing.assert_allclose(free[0], frozen[0], rtol=1e-6)
    np.testing.assert_allclose(free[1][1], frozen[1][1], atol=1e-6)
    assert not np.asarray(frozen[1][0]).any()
    rng = np.random.default_rng(5)

    def exact(output):
        said = slow(loss, output, hidden, labels, teacher)[0]
        if loss.kind == "ce":
            return said
        q, p = log_softmax(output @ hidden), log_softmax(fixed @ teacher)
        each = (np.exp(p) * (p - q)).sum(0).reshape(A, D)
        weights = np.exp(-np.arange(D) / loss.gamma) * (labels >= 0)
        return (weights * each).sum() / weights.sum()

    np.testing.assert_allclose(free[0], exact(output), rtol=1e-5)
    for _ in range(5):
        step = rng.normal(size=output.shape) * 1e-5
        change = (exact(output + step) - exact(output - step)) / 2
        np.testing.assert_allclose(
            (np.asarray(free[1][0]) * step).sum(), change, rtol=2e-3, atol=1e-9
        )


def test_padding_counts_for_nothing():
    output, hidden, labels, _ = arrays()
    hidden[:, (labels < 0).reshape(-1)] = 1e30
    wide = [jnp.asarray(x, jnp.float32) for x in (output, hidden)]
    value, _ = block_loss(LossConfig(), wide[0], wide[1], jnp.asarray(labels))
    assert np.isfinite(value)
    none, _ = block_loss(LossConfig(), wide[0], wide[1], jnp.full((A, D), -1))
    assert none == 0


def correction(seed=3):
    """ "up" and what it is applied to, which is nothing at the first slot."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(R, A * D)) * (np.arange(A * D) % D > 0)
    return rng.normal(size=(V, R)), inputs


def slow_corrected(loss, output, hidden, labels, teacher, up, inputs, share):
    """The states that give the corrected logits with a wider output head, and the mixture of both losses."""
    wide, zeros = np.hstack([output, up]), np.zeros_like(inputs)
    taught = np.vstack([teacher, zeros])
    last = slow(loss, wide, np.vstack([hidden, inputs]), labels, taught)
    base = slow(loss, wide, np.vstack([hidden, zeros]), labels, taught)
    return (1 - share) * last[0] + share * base[0], last[1], base[1]


CORRECTED = [
    (LossConfig(gamma=2.0, chunk=5), 0.25),
    (LossConfig("fkl", chunk=7), 1.0),
    (LossConfig("rkl", teacher_top_k=4, gamma=3.0), 0.0),
]


@pytest.mark.parametrize(("loss", "share"), CORRECTED, ids=str)
def test_corrected_losses_and_their_gradients_equal_the_slow_ones(loss, share):
    output, hidden, labels, teacher = arrays(4)
    given = hidden, *correction()
    as_float = [jnp.asarray(x, jnp.float32) for x in (output, teacher)]

    def value(hidden, up, inputs):
        corrected = Corrected(up, inputs, jnp.float32(share))
        return block_loss(loss, as_float[0], hidden, jnp.asarray(labels), as_float[1], corrected)

    wide = [jnp.asarray(x, jnp.float32) for x in given]
    (found, said), gradients = jax.value_and_grad(value, (0, 1, 2), has_aux=True)(*wide)
    expected, hits, base_hits = slow_corrected(
        loss, output, hidden, labels, teacher, *given[1:], share
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_equal(np.asarray(said["hits"]), hits)
    np.testing.assert_equal(np.asarray(said["base_hits"]), base_hits)
    rng = np.random.default_rng(5)
    for which, gradient in enumerate(gradients):
        assert np.abs(gradient).max() > 0 or (which and share == 1)
        step = rng.normal(size=given[which].shape) * 1e-5
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step if i == which else x for i, x in enumerate(given)]
            ends.append(
                slow_corrected(loss, output, moved[0], labels, teacher, *moved[1:], share)[0]
            )
        np.testing.assert_allclose(
            (np.asarray(gradient) * step).sum(), (ends[0] - ends[1]) / 2, rtol=5e-3, atol=1e-9
        )
    assert not np.asarray(gradients[0])[:, (labels < 0).reshape(-1)].any()


def test_a_correction_of_nothing_is_none():
    loss = LossConfig(gamma=4.0)
    output, hidden, labels, _ = arrays()
    wide = [jnp.asarray(x, jnp.float32) for x in (output, hidden)]
    plain, said = block_loss(loss, *wide, jnp.asarray(labels))
    nothing = Corrected(jnp.ones((V, R)), jnp.zeros((R, A * D)), jnp.float32(0.5))
    same, more = block_loss(loss, *wide, jnp.asarray(labels), corrected=nothing)
    np.testing.assert_allclose(same, plain, rtol=1e-6)
    np.testing.assert_array_equal(more["base_hits"], said["hits"])


def test_the_share_of_the_uncorrected_loss_falls_from_one_to_nothing():
    shares = [float(base_share(LossConfig(), jnp.int32(step), 10)) for step in (0, 5, 10)]
    assert shares == pytest.approx([1, 0.5, 0])
    half = LossConfig(base_decay=0.5)
    assert [float(base_share(half, step, 10)) for step in (0, 4, 5, 9)] == pytest.approx(
        [1, 0.2, 0, 0]
    )
    assert float(base_share(LossConfig(base_decay=0.0), 0, 10)) == 0


def test_weights_that_depend_on_the_loss_are_refused_with_a_correction():
    output, hidden, labels, _ = arrays()
    wide = [jnp.asarray(x, jnp.float32) for x in (output, hidden)]
    some = Corrected(*(jnp.asarray(x, jnp.float32) for x in correction()), jnp.float32(0))
    with pytest.raises(ValueError, match="dpace must be off for a head with a correction"):
        block_loss(LossConfig(dpace=0.5), *wide, jnp.asarray(labels), corrected=some)
    with pytest.raises(ValueError, match="needs the target's final states as teacher"):
        block_loss(LossConfig("fkl"), *wide, jnp.asarray(labels), corrected=some)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gamma": -1.0}, "gamma"),
        ({"dpace": 2.0}, "dpace"),
        ({"chunk": 0}, "chunk"),
        ({"base_decay": 1.5}, "base_decay"),
    ],
)
def test_a_wrong_config_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        LossConfig(**wrong)
