"""A tiny random target on disk, with a tokenizer of upper-case ASCII, special tokens and a chat template."""

import json

from hub import byte_tokenizer, tensors, write_hub

BOS, EOS = 61, 62  # 63 is padding: the model's vocabulary is larger than the tokenizer's
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<A>"


def write_target(folder, tiny_model, template=TEMPLATE, **overrides):
    """The folder; ``tiny_model`` is the fixture."""
    settings = {"num_layers": 1, "vocab_size": 64, "max_positions": 200, "eos_ids": (EOS,)}
    config, params = tiny_model(**(settings | overrides))
    write_hub(folder, config, tensors(config, params))
    backend = byte_tokenizer()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    if template:
        special["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder
