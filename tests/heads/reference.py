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
    """States [depth, H] of the slots that draft.

    ``tensors`` by published name, ``taps`` [C, T, H] of all known tokens but the root.
    """
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    known, eps, head_dim = len(taps), config.norm_eps, config.head_dim
    taps = np.asarray(taps, np.float64).reshape(known, len(config.taps) * config.hidden_size)
    context = norm(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    first = 0 if config.shift_labels else 1  # slot that drafts the token after the root
    slots = depth + first
    x = np.asarray(embed, np.float64)[[root] + [config.mask_token_id] * (slots - 1)]
    everywhere = np.arange(known + slots)
    for layer in range(config.num_layers):

        def get(name, layer=layer):
            return tensors[f"layers.{layer}.{name}.weight"]

        seen = np.array(
            [[visible(config, layer, i, j, known) for j in everywhere] for i in range(slots)]
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
    return norm(x, tensors["norm.weight"], eps)[first:]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def read_token(tensors, embedded, state):
    """The GRU's state after one more token, as torch.nn.GRU's page says it."""
    w = np.asarray(tensors["prefix_gru.weight_ih_l0"], np.float64)
    u = np.asarray(tensors["prefix_gru.weight_hh_l0"], np.float64)
    size = len(state)
    reset, update, new = (slice(i * size, (i + 1) * size) for i in range(3))
    r = sigmoid(w[reset] @ embedded + u[reset] @ state)
    z = sigmoid(w[update] @ embedded + u[update] @ state)
    n = np.tanh(w[new] @ embedded + r * (u[new] @ state))
    return (1 - z) * n + z * state


def path_logits(config, tensors, embed, output, state, path):
    """Logits [Vd] of the draft after a path of tokens, root first; ``state`` [H] is its slot's."""
    logits = np.asarray(output, np.float64) @ state
    if len(path) - 1 < config.correction.prefix:
        return logits
    memory = np.zeros(config.correction.gru_size)
    for token in path:
        memory = read_token(tensors, np.asarray(embed[token], np.float64), memory)
    down = np.asarray(tensors["embed_proj.0.weight"], np.float64)
    mixed = down @ np.concatenate([state, memory])
    return logits + np.asarray(tensors["embed_proj.2.weight"], np.float64) @ (
        mixed * sigmoid(mixed)
    )


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def chain(config, tensors, embed, output, ids, states, root):
    """Domino's drafts: tokens, and the log-probabilities of their paths."""
    path, score, scores = [root], 0.0, []
    for state in states:
        logps = log_softmax(path_logits(config, tensors, embed, output, state, path))
        score += logps.max()
        path.append(int(ids[logps.argmax()]))
        scores.append(score)
    return path[1:], scores


def tree(
    config,
    tensors,
    embed,
    output,
    ids,
    states,
    root,
    budget,
    keeps,
    candidates,
    penalty,
    whole=False,
):
    """DARTree's nodes, one at a time: {path: log-probability}, the root's path () included.

    ``keeps`` nodes are kept of each depth, of all those the best ``budget`` by score less penalty * depth. With
    ``whole`` all tokens have a part in the log-probabilities, those that are no candidates by ``base``.
    """
    level, kept = {(): 0.0}, {(): 0.0}
    for state, keep in zip(states, keeps):
        base = np.asarray(output, np.float64) @ state
        few = np.argsort(-base, kind="stable")[:candidates]
        found = {}
        for path, score in level.items():
            logits = path_logits(config, tensors, embed, output, state, [root, *path])
            logps = log_softmax(logits[few])
            if whole:
                mixed = base.copy()
                mixed[few] = logits[few]
                logps = log_softmax(mixed)[few]
            for index, logp in zip(few, logps):
                found[(*path, int(ids[index]))] = score + logp
        level = dict(sorted(found.items(), key=lambda item: -item[1])[:keep])
        kept |= level
    best = sorted(kept, key=lambda path: penalty * len(path) - kept[path])[:budget]
    return {path: kept[path] for path in best}
