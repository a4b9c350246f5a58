#!/usr/bin/env python3
"""Renders the chat templates of crates/model/tests/fixtures/templates with the `transformers` library and writes expected.json beside them.

Needs: pip install transformers tokenizers jinja2 (PyPI). Run it again after changing a template or a case; the test compares byte for byte.
"""
import json
import pathlib

import jinja2
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE

folder = pathlib.Path(__file__).resolve().parent.parent / "crates/model/tests/fixtures/templates"

tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & later, in °C — \"quoted\"",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "default": 1.0}},
            "required": ["city"],
        },
    },
}
hello = [{"role": "user", "content": "Hello"}]
system = [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": " What's 2+2?  "}]
turns = system + [{"role": "assistant", "content": "4"}, {"role": "user", "content": "And 🎉 \n\n naïve\ttabs?"}]
call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}
called = hello + [
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "content": '{"temp": 21.5}'},
]
two_calls = hello + [
    {"role": "assistant", "content": "Looking.", "tool_calls": [call, {**call, "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}]},
    {"role": "tool", "content": "21"},
    {"role": "tool", "content": "30"},
]
thinking = hello + [
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi."},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "reasoning": "second thought", "content": "Hi again."},
]
values = [
    {"role": "user", "content": "a 'quoted' \"text\"\n\\", "numbers": [1, 2.5, -3], "flag": True, "no": False, "list": ["it's", 'say "x"', 1, None, {"k": [1.0, 1e16, 1e-5]}]},
    {"role": "assistant", "content": "", "big": 12345678901234567, "float": 0.1, "empty": {}, "none": None},
]

cases = []
for template in ["smollm2", "llama3_like", "chatml_tools"]:
    date = {"date_string": "26 Jul 2024"} if template == "llama3_like" else {}
    for name, messages in [("hello", hello), ("system", system), ("turns", turns)]:
        for prompt in [True, False]:
            cases.append((template, name, messages, None, date, prompt))
for name, messages in [("called", called), ("two_calls", two_calls)]:
    cases.append(("llama3_like", name, messages, [tool], {"date_string": "1 Jan 2026"}, True))
    cases.append(("chatml_tools", name, messages, [tool, {"type": "function", "function": {"name": "f", "parameters": {}}}], {}, True))
cases += [
    ("llama3_like", "wrong_turn", [{"role": "assistant", "content": "x"}], None, {"date_string": "x"}, True),
    ("chatml_tools", "thinking", thinking, None, {}, True),
    ("chatml_tools", "no_thinking", hello, None, {"enable_thinking": False}, True),
    ("chatml_tools", "system_and_tools", system, [tool], {}, True),
    ("chatml_tools", "documents", hello, None, {"documents": [{"title": "One", "text": "first line\nsecond"}, {"title": "two", "text": "  x "}]}, False),
    ("values", "values", values, None, {}, False),
    ("values", "extra", values[:1], [tool], {"extra": {"a": 1}}, False),
]

tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), bos_token="<|begin_of_text|>", eos_token="<|im_end|>")
out = []
for template, name, messages, tools, kwargs, prompt in cases:
    source = (folder / f"{template}.jinja").read_text()
    row = {"template": template, "name": name, "messages": messages, "tools": tools, "kwargs": kwargs, "add_generation_prompt": prompt}
    try:
        row["rendered"] = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False, **kwargs
        )
    except jinja2.exceptions.TemplateError as error:
        row["raised"] = str(error)
    out.append(row)
text = json.dumps({"transformers": transformers.__version__, "jinja2": jinja2.__version__, "cases": out}, ensure_ascii=False, indent=1)
(folder / "expected.json").write_text(text + "\n")
print(f"{len(out)} cases")
