"""Makes chat.json: chat templates, messages, and what transformers renders and tokenizes.

Run in an environment with transformers 5, after make_tokenizer_golden.py: python tests/golden/make_chat_golden.py
In: tokenizers.json. Out: chat.json beside this file, read by test_chat.py. The templates are written for this project
in the manner of well-known ones.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}""",
    "llama-3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|im_start|>' + "
        "message['role'] + '<|im_end|>\n\n' + message['content'] | trim + eos_token %}{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{{ '<|im_start|>assistant<|im_end|>\n\n' }}"
    ),
    "mistral": """{{ bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must take turns: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ message.content.strip() ~ ' [/INST]' }}
    {%- else %}
        {{- ' ' ~ message.content[:40] ~ eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "thinking": """
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    "tools": """
{%- macro show(tool) -%}
{{ tool.name }}: {{ tool.parameters | tojson }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- show(tool) + '\\n' }}{{ tool | tojson(indent=2) }}{{ tool | tojson(separators=(',', ':'), sort_keys=true) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<call>' + (call.function.arguments | tojson) + '</call>' }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- unknown_name }}{{ messages | length }}{{ dict(a=1)['a'] }}{{ pad_token }}""",
}
TALK = [
    {"role": "user", "content": "Hello,  how are you? "},
    {"role": "assistant", "content": "Fine.\nAnd you? I'm glad; 1234567 caf\u00e9 \u4f60\u597d \U0001f600"},
    {"role": "user", "content": "  <b>bold</b> & \"quotes\" it's\n\n"},
]
SYSTEM = [{"role": "system", "content": "You are terse."}, *TALK]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function":
        {"name": "weather", "arguments": {"place": "Z\u00fcrich", "n": 1.5, "x": None}}
    }]},
    {"role": "tool", "name": "weather", "content": "{\"t\": 3}"},
    {"role": "assistant", "content": "3 degrees"},
    {"role": "stop", "content": "not shown"},
    {"role": "user", "content": "not shown either"},
]  # fmt: skip
TOOLS = [{"name": "weather", "parameters": {"type": "object", "z": [1, 2, {"<": "\u00e9'"}], "a": True}}]
THOUGHTS = [TALK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}, TALK[2]]
CASES = [
    ("chatml", TALK, {}), ("chatml", SYSTEM, {}), ("llama-3", TALK, {}), ("llama-3", SYSTEM, {}), ("mistral", TALK, {}),
    ("zephyr", TALK, {}), ("zephyr", SYSTEM, {}), ("thinking", THOUGHTS, {}),
    ("thinking", THOUGHTS, {"enable_thinking": False}), ("tools", CALLS, {"tools": TOOLS}), ("tools", TALK, {}),
]  # fmt: skip


def main() -> None:
    here = Path(__file__).parent
    bpe = json.loads((here / "tokenizers.json").read_text())["bpe"]
    kind = bpe["kinds"]["qwen2"]
    n = len(bpe["tokens"])
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": kind["normalizer"],
        "pre_tokenizer": kind["pre_tokenizer"], "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "added_tokens": [
            {"id": n + i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": t in bpe["special"]}
            for i, t in enumerate(bpe["special"] + bpe["user_defined"])
        ],
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(bpe["tokens"])}, "merges": bpe["merges"]},
    }  # fmt: skip
    hf = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(whole)), bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    cases = []
    for name, messages, extra in CASES:
        for prompt in (True, False):
            options = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompt, **extra}
            text = hf.apply_chat_template(messages, tokenize=False, **options)
            ids = hf.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            cases.append({
                "template": name, "messages": messages, "extra": extra, "add_generation_prompt": prompt,
                "text": text, "ids": ids,
            })  # fmt: skip
    path = here / "chat.json"
    path.write_text(json.dumps({"templates": TEMPLATES, "cases": cases}, indent=1) + "\n", encoding="ascii")
    print(f"{path}: {path.stat().st_size} bytes, {len(cases)} cases")


if __name__ == "__main__":
    main()
