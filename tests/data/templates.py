"""Chat templates of the kinds in use, written for the tests."""

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # as Llama 3: bos from the template, contents trimmed
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
THINK = (  # as Qwen3: thinking kept (or an empty block made) in the last answer only
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set parts = m['content'].split('</think>') %}"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n"
    "{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' }}"
    "\n</think>\n\n{% endif %}{{ parts[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
OPEN_THINK = (  # as DeepSeek-R1: the prompt opens the thinking, the history drops it
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'].split('</think>')[-1] }}"
    "</s>{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
PLAIN = (  # words instead of special tokens; a blank before the end token
    "{% for m in messages %}{% if m['role'] == 'assistant' %}ASSISTANT: {{ m['content'] }} </s>"
    "{% else %}{{ m['role'] | upper }}: {{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
NEXT_USER_ENDS = (  # as GLM-4: the next speaker's token ends the answer
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALTERNATING = (  # refuses a system message
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('system role not supported') }}{% endif %}"
    "{{ m['content'] }}</s>{% endfor %}"
)
GEMMA = (  # as Gemma: the assistant is "model", contents trimmed
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
INST = (  # as Mistral: a blank before the answer, no generation prompt
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}"
    "</s>{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
MARKED = (  # with generation marks around the end-of-turn token
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_INSIDE = (  # with generation marks that leave the end-of-turn token out
    MARKED.replace(
        "{{ m['content'] }}<|im_end|>{% endgeneration %}",
        "{{ m['content'] }}{% endgeneration %}<|im_end|>",
    )
)
