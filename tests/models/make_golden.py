"""Makes the golden files with transformers and torch: ``python tests/models/make_golden.py``.

The functions are also what the tests marked ``parity`` call to compare live.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_io import GOLDEN
from golden_text import CHATS, STRINGS, TEMPLATE_VARIABLES, TEMPLATES
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from jspec.models.load import DEFAULT_TARGET, locate

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# config.json of each case, with the rope keys of transformers 5 in some and of 4 in others
CONFIGS = {
    "llama_llama3": SIZES | {"model_type": "llama", "vocab_size": 97, "rope_parameters": LLAMA3},
    "llama_linear": SIZES
    | {
        "model_type": "llama",
        "vocab_size": 131,
        "tie_word_embeddings": True,
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
    "qwen2": SIZES
    | {"model_type": "qwen2", "vocab_size": 101, "rope_theta": 1e6, "use_sliding_window": False},
    "qwen3": SIZES
    | {
        "model_type": "qwen3",
        "vocab_size": 113,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
SHARDED = "qwen2"
SMOLLM2_TEXT = """def mean(values: list[float]) -> float:
    return sum(values) / len(values)

The mean of 3, 14 and 15 is 10.666..., and the Greek letter for it is μ. "Why μ?" she asked."""
SMOLLM2_POSITIONS = (0, 1, 17, 33, 48, -1)
SMOLLM2_LAYERS = (0, 14, 29)


def write_model(name: str, folder: Path) -> None:
    """A random model of one case in hub layout, the same on every call."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    weights = {}
    for key, value in sorted(model.state_dict().items()):
        noise = torch.randn(value.shape, generator=generator)
        if "norm" in key:
            noise = 1 + 0.3 * noise
        elif not key.endswith("bias"):
            gain = 4 if "embed" in key or "lm_head" in key else 1.5
            noise = gain * noise / value.shape[-1] ** 0.5
        weights[key] = noise.numpy()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if name != SHARDED:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    keys = sorted(weights)
    shards = {"1": keys[: len(keys) // 2], "2": keys[len(keys) // 2 :]}
    where = {}
    for number, part in shards.items():
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({key: weights[key] for key in part}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


@torch.no_grad()
def run(folder: Path, input_ids: np.ndarray) -> dict[str, np.ndarray]:
    """Every output of ``golden_io.Case``, computed by transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hiddens = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: hiddens.append(out))
    normed = []
    model.model.norm.register_forward_hook(lambda module, args, out: normed.append(out))
    logits = model(torch.tensor(input_ids, dtype=torch.long)).logits
    return {
        "input_ids": np.asarray(input_ids, np.int32),
        "logits": logits.numpy(),
        "hiddens": torch.stack(hiddens).numpy(),
        "normed": normed[0].numpy(),
    }


def run_case(name: str, folder: Path) -> dict[str, np.ndarray]:
    """``run`` on the case's 40 tokens."""
    tokens = random.Random(name).choices(range(CONFIGS[name]["vocab_size"]), k=40)
    return run(folder, np.array([tokens], np.int32))


def run_smollm2(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of ``golden_io.load_smollm2``."""
    input_ids = np.array([AutoTokenizer.from_pretrained(folder)(SMOLLM2_TEXT).input_ids])
    out = run(folder, input_ids)
    positions = np.array(SMOLLM2_POSITIONS, np.int32) % input_ids.shape[1]
    return {
        "input_ids": out["input_ids"],
        "argmax": out["logits"].argmax(-1).astype(np.int32),
        "positions": positions.astype(np.int32),
        "layers": np.array(SMOLLM2_LAYERS, np.int32),
        "logits": out["logits"][:, positions],
        "normed": out["normed"][:, positions],
        # save_file takes a strided array's memory as it lies
        "hiddens": np.ascontiguousarray(out["hiddens"][list(SMOLLM2_LAYERS)][:, :, positions]),
    }


def run_tokenizer(folder: Path) -> dict[str, Any]:
    """What AutoTokenizer makes of ``golden_text``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        {
            "text": tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate
            ),
            "ids": tokenizer.apply_chat_template(messages, add_generation_prompt=generate)[
                "input_ids"
            ],
        }
        for messages in CHATS
        for generate in (True, False)
    ]
    templates = [
        tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **TEMPLATE_VARIABLES,
        )
        for template in TEMPLATES
        for messages in CHATS
    ]
    ids = [tokenizer(text).input_ids for text in STRINGS]
    return {
        "ids": ids,
        "decoded": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
        "chats": chats,
        "templates": templates,
    }


def smollm2_folder() -> Path:
    """The default target as a hub-style directory."""
    return locate(DEFAULT_TARGET)


def main() -> None:
    smollm2 = smollm2_folder()
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in CONFIGS:
        write_model(name, GOLDEN / name)
        save_file(run_case(name, GOLDEN / name), GOLDEN / name / "expected.safetensors")
    save_file(run_smollm2(smollm2), GOLDEN / "smollm2.safetensors")
    (GOLDEN / "tokenizer.json").write_text(json.dumps(run_tokenizer(smollm2)) + "\n")


if __name__ == "__main__":
    main()
