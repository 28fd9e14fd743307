"""EAGLE-3 in plain NumPy, float64: one row, no cache, each draft from nothing but tokens, taps and a path."""

import math

import numpy as np

from tests.heads.reference import norm, rotate


def features(config, tensors, embed, taps, tokens, path):
    """States [1 + len(path), H] before the final norm: after the root, and after each token of a path below it.

    ``tensors`` by published name, ``tokens`` are known, the root last, ``taps`` [C, T, H] those of all but the root.
    """
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    embed, known, head_dim = np.asarray(embed, np.float64), len(taps), config.head_dim
    assert len(tokens) == known + 1

    def get(name):
        return tensors[f"midlayer.{name}.weight"]

    def attention_input(token, feature):
        e = norm(embed[token], get("input_layernorm"), config.norm_eps)
        return np.concatenate([e, norm(feature, get("hidden_norm"), config.norm_eps)])

    fused = config.tap_count * config.hidden_size
    given = np.asarray(taps, np.float64).reshape(known, fused) @ tensors["fc.weight"].T
    # Position and attention input of every pair: those of the context, then the root's and those of the path.
    rows = [(i, attention_input(tokens[i], given[i - 1])) for i in range(1, known)]
    feature = given[-1] if known else np.zeros(config.hidden_size)
    out = []
    for at, token in enumerate([tokens[-1], *path], known):
        rows.append((at, attention_input(token, feature)))
        positions, x = np.array([p for p, _ in rows]), np.array([r for _, r in rows])
        mixed = []
        for head in range(config.num_heads):
            own = slice(head * head_dim, (head + 1) * head_dim)
            group = head * config.num_kv_heads // config.num_heads
            shared = slice(group * head_dim, (group + 1) * head_dim)
            q = rotate(config, x[-1:] @ get("self_attn.q_proj")[own].T, positions[-1:])
            k = rotate(config, x @ get("self_attn.k_proj")[shared].T, positions)
            scores = (q @ k.T)[0] / math.sqrt(head_dim)
            p = np.exp(scores - scores.max())
            mixed.append(p / p.sum() @ (x @ get("self_attn.v_proj")[shared].T))
        start = rows[-1][1][config.hidden_size :] if config.norm_before_residual else feature
        h = start + get("self_attn.o_proj") @ np.concatenate(mixed)
        y = norm(h, get("post_attention_layernorm"), config.norm_eps)
        gate = get("mlp.gate_proj") @ y
        feature = h + get("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * (get("mlp.up_proj") @ y))
        out.append(feature)
    return np.array(out)


def log_probs(config, tensors, output, states):
    """Of all draft tokens, after states before the final norm."""
    x = norm(states, np.asarray(tensors["norm.weight"], np.float64), config.norm_eps)
    logits = x @ np.asarray(output, np.float64).T
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def dynamic_tree(children, budget, depth, width):
    """EAGLE-2's tree as published: every candidate is recorded, the best ones stay. {path: log-probability}.

    ``children(path)`` gives log-probabilities by token; the root is no candidate, and is not in the result.
    """
    recorded, frontier = [], [((), 0.0)]
    for _ in range(depth):
        level = []
        for path, score in frontier:
            logps = children(path)
            best = sorted(logps, key=lambda token: (-logps[token], token))[:width]
            level += [((*path, token), score + logps[token]) for token in best]
        recorded += level
        frontier = sorted(level, key=lambda one: -one[1])[:width]
    return dict(sorted(recorded, key=lambda one: -one[1])[: budget - 1])
