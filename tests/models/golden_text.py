# ruff: noqa: RUF001 (odd characters are the point)
"""Texts that the tokenizer is compared on: 200 strings and a few chats."""

import random

_HAND_WRITTEN = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n\r\n",
    "\t\t\tdeep",
    " " * 37,
    " " * 200 + "x",
    "\n" * 50,
    "a",
    " a",
    "a ",
    "Hello, world!",
    "hello world  with   uneven    spaces",
    "trailing space ",
    "trailing newline\n",
    "It's, they've, I'm, we'd, you'll, he's, SHE'S, O'Neill",
    "0",
    "7 77 777 7777 77777",
    "3.14159265358979 -2.5e-10 1,000,000 0xFF 1/2",
    "2024-02-29T23:59:60Z",
    "Ⅳ ½ ² ٣ ४ 五",  # numbers that are not ASCII digits
    "x1y2z3",
    "def f(x):\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "\tif err != nil {\n\t\treturn nil, err\n\t}\n",
    "SELECT * FROM t WHERE a = 'b' AND c <> \"d\";",
    '{"key": [1, 2.0, null, true], "nested": {"k": "v"}}',
    "<html>\n  <body class='x'>&nbsp;</body>\n</html>",
    "https://example.org/a/b?c=d&e=f#g",
    "user@example.org",
    "C:\\Users\\name\\file.txt",
    '#!/bin/sh\nset -eu\necho "$HOME" | tr a-z A-Z > /dev/null 2>&1\n',
    "\\frac{a}{b} + \\sqrt{x^2 + y^2} = \\boxed{42}",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "- [ ] todo\n- [x] done\n\n> quote\n\n```python\nprint()\n```",
    "ALL CAPS TEXT",
    "camelCase snake_case kebab-case SCREAMING_SNAKE",
    "antidisestablishmentarianism",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "abababababababababababababababab",
    "!!!???...---___===+++***",
    "“curly” ‘quotes’ — dashes – and … ellipsis",
    "Übergrößenträger, naïve café, Ångström, señor",
    "e\u0301 versus \u00e9: two ways to write it",
    "\ufeffbyte order mark",
    "zero\u200bwidth\u200djoiner\u00a0nbsp\u3000wide",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "你好,世界。今天天气很好",
    "こんにちは世界 カタカナ",
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "🙂",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷",
    "math: ∀x∈ℝ, ∃y: x² + y² ≤ 1 ⇒ |x| ≤ 1",
    "music 𝄞 and 𝕱𝖗𝖆𝖐𝖙𝖚𝖗 beyond the BMP",
    "control \x00 \x01 \x1b[31mred\x1b[0m \x7f",
    "\u2028line separator\u2029paragraph separator",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text <|im_end|> with a special token inside",
    "glued<|im_end|>together<|endoftext|>",
    "< | im_end | > is not special, nor is <|im_end",
    "<repo_name>a/b<file_sep>x.py\n",
    "<empty_output><jupyter_start>",
    "ＦＵＬＬ ｗｉｄｔｈ",
    "ﬁ ﬂ ligatures",
    "İstanbul ı I i",
    "ß ẞ SS",
    "word" * 40,
    "The quick brown fox jumps over the lazy dog. " * 5,
    "Question: what is 17 * 23?\nAnswer: 17 * 23 = 391.",
    "    indented\n        more\n    less\nnone",
    "mixed\ttabs \t and spaces\n \n  \n",
    "1. First\n2. Second\n10. Tenth\n",
    "price: $1,299.99 (20% off!) & free £5 or €6",
    "a=b==c===d!=e<=f>=g->h=>i::j",
    "ok\rcarriage\rreturns",
]


def _mixed(count: int) -> list[str]:
    """Seeded mixtures of pieces from everywhere, glued with odd white space."""
    rng = random.Random(2)
    pieces = [piece for text in _HAND_WRITTEN for piece in text.split()]
    glue = ["", "", " ", " ", "  ", "\n", "\n\n", "\t", "   ", "\r\n", "\u00a0"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789 .,'-_éüñ中文日🙂\n"
    texts = []
    for i in range(count):
        if i % 4 == 0:
            texts.append("".join(rng.choices(letters, k=rng.randrange(5, 80))))
        else:
            size = rng.randrange(2, 25)
            texts.append("".join(rng.choice(pieces) + rng.choice(glue) for _ in range(size)))
    return texts


STRINGS = _HAND_WRITTEN + _mixed(200 - len(_HAND_WRITTEN))

CHATS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "user", "content": ""}],
    [
        {"role": "system", "content": "Answer in French.\n"},
        {"role": "user", "content": "<b>Hello</b> & \"good\" 'morning' 🙂"},
    ],
    [
        {"role": "user", "content": "  leading and trailing  \n"},
        {"role": "assistant", "content": "```python\nprint(1)\n```"},
        {"role": "user", "content": "{{ not a template }} {% nor this %} <|im_end|>"},
    ],
]

# Templates that use what the hub's templates use; each is rendered for every chat.
TEMPLATES = [
    "{% for m in messages %}\n{{ m.role | upper }}: {{ m['content'] | trim }}\n{% endfor %}\n",
    """{%- if tools %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {{- bos_token + message.role + ': ' }}
    {% generation %}{{ message.content | tojson }}{% endgeneration %}
    {{- eos_token }}
{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '(no thoughts)' }}{% endif %}
{%- endif %}""",
    """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- ns.last }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{%- if messages[0].content is not string %}{{ raise_exception('text only') }}{% endif %}
{{ strftime_now('%Y') | length }}""",
]
TEMPLATE_VARIABLES = {
    "enable_thinking": False,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds <a> & <b>: größer",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ],
}
