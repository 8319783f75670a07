"""Chat templates of the twins: short ones of our own that do what the families' own do.

What a real template does with a conversation decides what is trained, so each twin does it too: where
tools and their results stand, which thoughts of earlier turns are dropped, what ends a turn in history,
which turns are refused. Only the prose around tools is shorter.
"""

from __future__ import annotations

# Turns as they are: SmolLM2, Qwen 2.
CHATML = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Qwen 3 and Qwen 3 Coder: tools in the system turn, their results in a user turn.
_QWEN_HEAD = """
{%- set own = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if own or tools -%}
{{- '<|im_start|>system\\n' + own + ('\\n\\n' if own and tools else '') -}}
{%- if tools -%}
{{- '# Tools\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\nCall one so:\\n' + way -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
"""
_QWEN_RESULT = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
"""

# Thoughts stay behind the last question alone.
QWEN3 = (
    """
{%- set way = '<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' -%}
"""
    + _QWEN_HEAD
    + """
{%- set last = namespace(question=messages | length) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > last.question and message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
"""
    + _QWEN_RESULT
    + """
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""
)

# No thoughts; a call's arguments are text between tags.
QWEN3_CODER = (
    """
{%- set way = '<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n' -%}
{%- set way = way + '</tool_call>' -%}
"""
    + _QWEN_HEAD
    + """
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n' -}}
{{- '<function=' + call.function.name + '>\\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
"""
    + _QWEN_RESULT
    + """
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)

# The day and the tools come first, one call a turn, results come from `ipython`.
LLAMA3 = """
{%- if date_string is not defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}
{%- set system = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set system, messages = messages[0].content | trim, messages[1:] -%}
{%- endif -%}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{{- ('Environment: ipython\\n' if tools else '') + 'Day: ' + date_string + '\\n\\n' -}}
{{- system + '<|eot_id|>' -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- if loop.first and tools -%}
{{- 'Call one of these as {"name": NAME, "parameters": OBJECT}:\\n\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n\\n' -}}{%- endfor -%}
{%- endif -%}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length > 1 -%}{{- raise_exception('one call a turn') -}}{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' -}}
{%- elif message.role == 'tool' -%}
{{- message.content | tojson -}}
{%- else -%}
{{- message.content | trim -}}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

# Thoughts are dropped, save those before a call that no final answer has followed yet.
HARMONY = """
{%- if reasoning_effort is not defined -%}{%- set reasoning_effort = 'medium' -%}{%- endif -%}
{{- '<|start|>system<|message|>An assistant.\\nDay: ' + strftime_now('%Y-%m-%d') -}}
{{- '\\nReasoning: ' + reasoning_effort + '\\nChannels: analysis, commentary, final.' -}}
{{- ('\\nCalls go to commentary.' if tools else '') + '<|end|>' -}}
{%- set own = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set own, messages = messages[0].content, messages[1:] -%}
{%- endif -%}
{%- if own or tools -%}
{{- '<|start|>developer<|message|>' + ('# Instructions\\n\\n' + own + '\\n\\n' if own else '') -}}
{%- if tools -%}
{{- '# Tools\\n\\nnamespace functions {\\n' -}}
{%- for tool in tools -%}
{{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: ' -}}
{{- (tool.function.parameters | tojson) + ') => any;\\n' -}}
{%- endfor -%}
{{- '}' -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(called=none) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and 'tool_calls' in message -%}
{%- set after = namespace(final=false) -%}
{%- for later in messages[loop.index:] -%}
{%- if later.role == 'assistant' and 'tool_calls' not in later -%}{%- set after.final = true -%}{%- endif -%}
{%- endfor -%}
{%- if message.content and message.thinking -%}
{{- raise_exception('a call has content or thinking, not both') -}}
{%- elif (message.content or message.thinking) and not after.final -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' -}}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{%- set last.called = call.name -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- (call.arguments | tojson) + '<|call|>' -}}
{%- elif message.role == 'assistant' -%}
{%- set last.called = none -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{%- if last.called is none -%}{{- raise_exception('a result without a call') -}}{%- endif -%}
{{- '<|start|>functions.' + last.called + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- (message.content | tojson) + '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

# A call, its result and what follows are one turn; thoughts stay behind the last question alone.
GEMMA4 = """
{%- macro value(given) -%}
{%- if given is string -%}{{- '<|"|>' + given + '<|"|>' -}}
{%- elif given is boolean -%}{{- 'true' if given else 'false' -}}
{%- elif given is mapping -%}{{- '{' + pairs(given) + '}' -}}
{%- elif given is sequence -%}
{{- '[' -}}{%- for one in given -%}{{- value(one) + ('' if loop.last else ',') -}}{%- endfor -%}{{- ']' -}}
{%- else -%}{{- given -}}{%- endif -%}
{%- endmacro -%}
{%- macro pairs(given) -%}
{%- for key, one in given | dictsort -%}
{{- key + ':' + value(one) + ('' if loop.last else ',') -}}
{%- endfor -%}
{%- endmacro -%}
{%- set thoughtful = enable_thinking is defined and enable_thinking -%}
{%- set own = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set messages = messages[1:] if messages[0].role == 'system' else messages -%}
{{- bos_token -}}
{%- if own or thoughtful or tools -%}
{{- '<|turn>system\\n' + ('<|think|>\\n' if thoughtful else '') + (own | trim) -}}
{%- for tool in tools or [] -%}
{{- '<|tool>declaration:' + tool.function.name + '{description:' + value(tool.function.description) -}}
{{- ',parameters:{' + pairs(tool.function.parameters) + '}}<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- set last = namespace(question=-1, role='', open=false) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role != 'tool' -%}
{%- set place = loop.index0 -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{%- if not (role == 'model' and last.role == 'assistant') -%}{{- '<|turn>' + role + '\\n' -}}{%- endif -%}
{%- set last.role, last.open = message.role, false -%}
{%- if message.reasoning_content and place > last.question and message.tool_calls -%}
{{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<|tool_call>call:' + call.function.name + '{' + pairs(call.function.arguments) + '}<tool_call|>' -}}
{%- endfor -%}
{%- set results = namespace(some=false, over=false) -%}
{%- for result in messages[place + 1:] if message.tool_calls -%}
{%- if result.role != 'tool' -%}{%- set results.over = true -%}{%- endif -%}
{%- if not results.over -%}
{%- set results.some = true -%}
{{- '<|tool_response>response:' + result.name + '{value:' + value(result.content) + '}<tool_response|>' -}}
{%- endif -%}
{%- endfor -%}
{{- message.content | trim -}}
{%- if message.tool_calls and not results.some -%}
{{- '<|tool_response>' -}}
{%- elif not (results.some and not message.content) -%}
{{- '<turn|>\\n' -}}
{%- else -%}
{%- set last.open = true -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not last.open -%}
{{- '<|turn>model\\n' + ('' if thoughtful else '<|channel>thought\\n<channel|>') -}}
{%- endif -%}
"""
