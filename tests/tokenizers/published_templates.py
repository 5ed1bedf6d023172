"""Chat templates written out in the manner of published models, and one small vocabulary that holds all their tokens.

They keep what matters to a conversation: how roles are named, what is trimmed, how tools and their results are shown, and which
earlier turns are changed. `THINKING` names those that drop what was thought in earlier turns.
"""
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}"
    "{%- endif %}{{- '# Tools\n\nYou may call one or more functions.\n<tools>' }}{%- for tool in tools %}{{- '\n' }}"
    "{{- tool | tojson }}{%- endfor %}{{- '\n</tools>\n\nReturn a json object within <tool_call></tool_call> XML tags' }}"
    "{{- '<|im_end|>\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
)
_RESULT = (
    "{%- elif message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}"
)
QWEN25 = (
    _TOOLS + "{%- for message in messages %}{%- if message.role == 'user' or message.role == 'assistant' or "
    "(message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}" + _RESULT + "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN3 = (
    _TOOLS + "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and not (message.content.startswith('<tool_response>') "
    "and message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}"
    "{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}{%- set thought = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index and (loop.last or thought) %}"
    "{{- '<|im_start|>' + message.role + '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}" + _RESULT
    + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' }}"
    "{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{%- endif %}"
    "{{- system }}{{- '<|eot_id|>' }}{%- for message in messages %}"
    "{%- if message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | trim }}{{- '<|eot_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
# With tools: they are shown in the first message of the user, calls are JSON, and results, which are texts, too.
LLAMA31 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if builtin_tools is defined or tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}"
    "{{- 'Cutting Knowledge Date: December 2023\n\n' + system + '<|eot_id|>' }}"
    "{%- if tools is not none %}{%- set question = messages[0]['content']|trim %}{%- set messages = messages[1:] %}"
    "{{- '<|start_header_id|>user<|end_header_id|>\n\nRespond with JSON for a call of one of these functions.\n\n' }}"
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{{- question + '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}"
    "{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}{%- if not message.tool_calls|length == 1 %}"
    "{{- raise_exception('One call in a message') }}{%- endif %}{%- set call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{%- if builtin_tools is defined and call.name in builtin_tools %}{{- '<|python_tag|>' + call.name + '.call(' }}"
    "{%- for name, value in call.arguments | items %}{{- name + '=\"' + value + '\"' + ('' if loop.last else ', ') }}"
    "{%- endfor %}{{- ')' }}{%- else %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}' }}{%- endif %}"
    "{{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first = messages[0]['content'] + '\n\n' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for message in rest -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
    "{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
)
# Without a token of its own at the end of a turn, and with a line break before the one at the end of the policy's.
LINES = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' + ('</s>' if m.role == 'assistant' else '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEMPLATES = {"smollm2": SMOLLM2, "qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "llama3.1": LLAMA31, "gemma3": GEMMA3,
             "lines": LINES}
ENDS = {"llama3": "<|eot_id|>", "llama3.1": "<|eot_id|>", "gemma3": "<end_of_turn>", "lines": "</s>"}  # others: "<|im_end|>"
ALTERNATING = ("gemma3", "lines")  # the user says results of tools
THINKING = ("qwen3",)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "</s>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # whole, not special
BEGINS = {"llama3": "<|begin_of_text|>", "llama3.1": "<|begin_of_text|>", "gemma3": "<bos>"}


def vocabulary():
    """A byte-level BPE whose merges join line breaks, so that what stands side by side matters; cut as in Llama 3."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(words, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=342, special_tokens=SPECIALS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    text = "user\n\nassistant\n\nsystem\n\nmodel\n\nthe result is the answer\n\n\nThe answer: 42 <|im_ <tool |> "
    backend.train_from_iterator([text] * 20, trainer)
    backend.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS] + [AddedToken("\n\n\n")])
    return backend
