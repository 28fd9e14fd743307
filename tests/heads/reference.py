"""A parallel head in plain NumPy, float64: one row, no cache, every key of every query asked about its visibility."""

import math

import numpy as np


def norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def speeds(config):
    """Radians a position, of each pair of dimensions."""
    out = []
    for i in range(config.head_dim // 2):
        speed = config.rope_theta ** (-2 * i / config.head_dim)
        scaling = config.rope_scaling
        if scaling and scaling.kind == "linear":
            speed /= scaling.factor
        elif scaling:
            turns = scaling.original_max_position * speed / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = min(max((turns - low) / (high - low), 0), 1)
            speed *= kept + (1 - kept) / scaling.factor
        out.append(speed)
    return np.array(out)


def rotate(config, x, positions):
    """x [n, hd]: dimension i turns with dimension i + hd / 2."""
    angle = positions[:, None] * speeds(config)
    a, b = np.split(x, 2, axis=1)
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1
    )


def visible(config, layer, slot, key, known):
    """Whether slot ``slot`` of the block sees key ``key``; the first ``known`` keys are the context."""
    window = config.windows[layer]
    distance = known + slot - key  # of absolute positions
    if window is not None:
        return 0 <= distance < window
    return key < known or distance >= 0 or not config.causal


def block(config, tensors, embed, taps, root, depth):
    """States [depth, H] of the drafted slots.

    ``tensors`` by published name, ``taps`` [C, T, H] of all known tokens but the root.
    """
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    known, eps, head_dim = len(taps), config.norm_eps, config.head_dim
    taps = np.asarray(taps, np.float64).reshape(known, len(config.taps) * config.hidden_size)
    context = norm(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    x = np.asarray(embed, np.float64)[[root] + [config.mask_token_id] * depth]
    everywhere = np.arange(known + depth + 1)
    for layer in range(config.num_layers):

        def get(name, layer=layer):
            return tensors[f"layers.{layer}.{name}.weight"]

        seen = np.array(
            [[visible(config, layer, i, j, known) for j in everywhere] for i in range(depth + 1)]
        )
        y = norm(x, get("input_layernorm"), eps)
        sources = np.concatenate([context, y])
        mixed = []
        for head in range(config.num_heads):
            own = slice(head * head_dim, (head + 1) * head_dim)
            group = head * config.num_kv_heads // config.num_heads
            shared = slice(group * head_dim, (group + 1) * head_dim)
            q = norm(y @ get("self_attn.q_proj")[own].T, get("self_attn.q_norm"), eps)
            k = norm(sources @ get("self_attn.k_proj")[shared].T, get("self_attn.k_norm"), eps)
            q, k = rotate(config, q, everywhere[known:]), rotate(config, k, everywhere)
            scores = np.where(seen, q @ k.T / math.sqrt(head_dim), -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            mixed.append(p @ (sources @ get("self_attn.v_proj")[shared].T))
        x = x + np.concatenate(mixed, axis=1) @ get("self_attn.o_proj").T
        y = norm(x, get("post_attention_layernorm"), eps)
        gate = y @ get("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ get("mlp.up_proj").T)) @ get("mlp.down_proj").T
    return norm(x, tensors["norm.weight"], eps)[1:]
