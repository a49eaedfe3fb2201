"""Chat templates for files that bring none that works, and how one is chosen.

In: a tokenizer. Out: the name of a template in TEMPLATES. Next: chat.py.

The beginning-of-sequence token is left to ChatTemplate.encode, which adds it where the vocabulary wants one.
"""

from __future__ import annotations

from hotcold.runtime.tokenizer import Tokenizer

_SYSTEM_INTO_USER = (
    "{% set system = messages[0]['content'] if messages and messages[0]['role'] == 'system' else none %}"
    "{% for m in (messages if system is none else messages[1:]) %}"
)

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-3": (
        "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
        " + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "llama-2": (
        _SYSTEM_INTO_USER + "{% if m['role'] == 'user' %}{{ (bos_token if not loop.first else '') + '[INST] ' }}"
        "{% if loop.first and system is not none %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
        "{{ m['content'] | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral": (
        _SYSTEM_INTO_USER + "{% if m['role'] == 'user' %}{{ '[INST] ' }}"
        "{% if loop.first and system is not none %}{{ system + '\n\n' }}{% endif %}{{ m['content'] + '[/INST]' }}"
        "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "phi-3": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "gemma": (
        _SYSTEM_INTO_USER + "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
        "{% if loop.first and system is not none %}{{ system + '\n\n' }}{% endif %}"
        "{{ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
}

# A template fits a vocabulary that has all these tokens; the first fit is taken.
_MARKS = (
    ("chatml", ("<|im_start|>", "<|im_end|>")),
    ("llama-3", ("<|start_header_id|>", "<|eot_id|>")),
    ("gemma", ("<start_of_turn>", "<end_of_turn>")),
    ("phi-3", ("<|user|>", "<|end|>")),
    ("zephyr", ("<|user|>", "<|assistant|>")),
    ("mistral", ("[INST]", "[/INST]")),
)


def choose(tokenizer: Tokenizer) -> tuple[str, str]:
    """Name of the template that fits the vocabulary, and the reason in words."""
    special = set(tokenizer.special_texts())
    for name, marks in _MARKS:
        if special.issuperset(marks):
            return name, f"the vocabulary has {marks[0]}"
    if tokenizer.vocabulary.kind == "spm" and "</s>" in special:
        return "llama-2", "the vocabulary is Llama 2's kind"
    return "chatml", "the vocabulary points to no other"
