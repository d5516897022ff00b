import time

import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models.chat_template import render_chat, render_plain
from rlax_stack.types import Message

_MESSAGES = [Message(role='user', content='Hi'), Message(role='assistant', content='Hello')]


def _render(template, messages=_MESSAGES, **special_tokens):
  return render_chat(template, messages, special_tokens=special_tokens)


def test_template_sees_messages_tokens_and_prompt_flag():
  template = (
    '{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m["content"] | trim }}{% if not '
    'loop.last %},{% endif %}{% endfor %}{% if add_generation_prompt %} >{% endif %}'
  )
  assert _render(template, bos_token='<s>') == '<s>[user] Hi,[assistant] Hello >'
  text = render_chat(template, _MESSAGES, add_generation_prompt=False, special_tokens={})
  assert text == '[user] Hi,[assistant] Hello'


def test_blocks_are_trimmed_as_transformers_does():
  template = 'a\n  {% if true %}\n  b\n  {% endif %}\nc\n'
  assert _render(template) == 'a\n  b\nc'


def test_common_features_of_published_templates():
  template = (
    '{%- set ns = namespace(found=false, text="") -%}'
    '{%- macro show(x) %}<{{ x }}>{% endmacro -%}'
    '{%- for m in messages if m.role == "user" %}{% set ns.found = true %}'
    '{% set ns.text = ns.text ~ "|" ~ m.content %}{% endfor -%}'
    '{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ show(m.role) }}'
    '{% endfor %}{% generation %}{{ ns.text }}{% endgeneration %}{{ ns.found }}'
    '{{ {"a": "<é>"} | tojson }}{{ messages | map(attribute="role") | join("+") }}'
    '{{ "a-b".replace("-", "_") }}{{ ",".join(["x", "y"]) }}{{ (messages | length) * 2 }}'
    '{{ messages[::-1][0].role }}{{ strftime_now is defined }}'
  )
  assert _render(template) == '<user>|HiTrue{"a": "<é>"}user+assistanta_bx,y4assistantFalse'


def test_mappings_and_tools_reach_the_template_as_they_are():
  template = (
    '{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}'
    '{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}'
  )
  call = {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'f'}}]}
  tool = {'type': 'function', 'function': {'name': 'f'}}
  text = render_chat(template, [*_MESSAGES, call], special_tokens={}, tools=[tool])
  assert text == 'f;HiHello{"name": "f"}'
  assert _render('{{ tools is defined }}') == 'False'


def test_a_template_may_refuse_the_messages():
  with pytest.raises(ModelFileError, match='roles must alternate'):
    _render('{{ raise_exception("roles must alternate") }}')


@pytest.mark.parametrize(
  'template',
  [
    '{{ messages.__class__.__mro__ }}',
    '{{ "".__class__ }}',
    '{{ messages.append(1) }}',
    '{{ messages[0].update({"role": "x"}) }}',
    '{{ lipsum.__globals__ }}',
    '{{ raise_exception.__globals__ }}',
    '{{ "%s" | format("x") }}',
    '{{ "{0.__class__}".format(1) }}',
    '{% include "x" %}',
    '{% for %}',
    '{{ 1 / 0 }}',
    '{{ messages[0].content.nothing.more }}',
    '{{ undefined_function() }}',
    '(' * 1000,
    '{{' + '(' * 1000,
    'x' * 200_000,
  ],
)
def test_malformed_and_escaping_templates_are_refused(template):
  if template.startswith('((('):
    assert _render(template) == template  # plain text
    return
  try:
    text = _render(template)
  except ModelFileError:
    return
  assert text == ''  # the sandbox shows unsafe attributes as undefined


@pytest.mark.parametrize(
  'template',
  [
    '{{ "a" * 10**9 }}',
    '{{ [1] * 10**9 }}',
    '{{ 10**9 * "a" }}',
    '{{ 9 ** 9 ** 9 }}',
    '{{ "%1000000000d" % 1 }}',
    '{{ "a".ljust(10**9) }}',
    '{{ "a".zfill(10**9) }}',
    '{{ (1).to_bytes(10**9, "big") }}',
    '{{ "a" | center(10**9) }}',
    '{{ "a\nb" | indent(10**9) }}',
    '{{ [1] | batch(10**9, 0) | list }}',
    '{{ [1] | tojson(indent=10**9) }}',
    '{{ ("a" * 10**6).replace("a", "a" * 1000) }}',
    '{{ ("a" * 10**6) | replace("a", "a" * 1000) }}',
    '{{ range(10**5) | join("a" * 1000) }}',
    '{{ ("a" * 10**6).join(range(1000)) }}',
    '{{ range(10**12) | list }}',
    '{% for i in range(10**9) %}{% endfor %}',
    '{% for i in range(10**4) %}{% for j in range(10**4) %}{% endfor %}{% endfor %}',
    '{% for i in range(10**4) %}{% for j in range(10**4) if false %}{% endfor %}{% endfor %}',
    '{% macro f(n) %}{{ f(n) ~ f(n) }}{% endmacro %}{{ f(1) }}',
    '{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}',
    '{% set ns = namespace(x="aa") %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}',
    '{% set ns = namespace(x="aa") %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}',
    '{% set ns = namespace(x="aa") %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}'
    '{% endset %}{% endfor %}',
    '{% for i in range(10**4) %}{{ "a" * 1000 }}{% endfor %}',
    '{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}',
    '{% for i in range(2) recursive %}{% if loop.depth < 40 %}{{ loop(range(2)) }}{% endif %}'
    '{% endfor %}',
  ],
)
def test_hostile_templates_end_soon(template):
  start = time.monotonic()
  with pytest.raises(ModelFileError):
    _render(template)
  assert time.monotonic() - start < 20


def test_budget_is_fresh_for_each_rendering():
  template = '{% for i in range(10000) %}{% endfor %}done'
  for _ in range(6):
    assert _render(template) == 'done'


def test_plain_rendering_of_mappings():
  assert render_plain([{'role': 'user', 'content': 'Hi'}]) == 'User: Hi\nAssistant:'


def test_plain_rendering_without_a_template():
  assert render_plain(_MESSAGES) == 'User: Hi\nAssistant: Hello\nAssistant:'
  assert render_plain(_MESSAGES[:1], add_generation_prompt=False) == 'User: Hi\n'
