"""Sources, templates and the identity of a question."""

import pytest

from rlax_stack.data import source as source_lib
from rlax_stack.data.source import PromptSource
from rlax_stack.errors import DataError
from rlax_stack.types import Message, Prompt


def make_prompt(prompt_id, content='q', **metadata):
  messages = (Message(role='user', content=content),)
  return Prompt(prompt_id=prompt_id, messages=messages, answer='1', metadata=metadata)


def test_a_source_is_a_sequence_with_a_fingerprint():
  prompts = [make_prompt('a'), make_prompt('b')]
  source = PromptSource('two', prompts)
  assert len(source) == 2 and source[1] is prompts[1] and source[-1] is prompts[1]
  assert source[:1] == (prompts[0],) and list(source) == prompts
  same = PromptSource('other name', prompts).fingerprint()
  assert source.fingerprint() == same
  assert PromptSource('two', prompts[::-1]).fingerprint() != same


@pytest.mark.parametrize(
  ('ids', 'message'),
  [([], 'prompt source s is empty'), (['a', 'b', 'a'], "has 2 prompts with the id 'a'")],
)
def test_a_source_needs_prompts_with_unique_ids(ids, message):
  with pytest.raises(DataError, match=message):
    PromptSource('s', [make_prompt(name) for name in ids])


def test_make_messages():
  user = Message(role='user', content='hi')
  assert source_lib.make_messages('hi', None) == (user,)
  assert source_lib.make_messages('hi', '') == (user,)
  system = Message(role='system', content='be brief')
  assert source_lib.make_messages('hi', 'be brief') == (system, user)


def test_templates_insert_values_as_they_are():
  template = 'Q: {question} in \\boxed{{}} {question}'
  assert source_lib.check_template(template, ['question'], 'x') == ('question',)
  filled = source_lib.fill_template(template, {'question': '{a} {0.__class__}'})
  assert filled == 'Q: {a} {0.__class__} in \\boxed{} {a} {0.__class__}'


@pytest.mark.parametrize(
  ('template', 'message'),
  [
    ('\\boxed{}', 'plain field names in braces only, got {}'),
    ('{question.__class__}', 'plain field names'),
    ('{question[0]}', 'plain field names'),
    ('{question!r}', 'plain field names'),
    ('{question:>9}', 'plain field names'),
    ('{question', 'is no template'),
    ('{qestion}', "names the field 'qestion'. The fields are: question"),
  ],
)
def test_templates_that_cannot_work(template, message):
  with pytest.raises(DataError, match=message):
    source_lib.check_template(template, ['question', 'answer'], 'prompt_template')


def test_question_key_is_of_the_question_alone():
  one = make_prompt('a', 'Solve: 1 + 1 =', question='1 + 1  =')
  other = make_prompt('b', 'Please solve 1 + 1 =', question=' 1 + 1 =')
  bare = make_prompt('c', '1 + 1 =')
  keys = {source_lib.question_key(prompt) for prompt in (one, other, bare)}
  assert keys == {source_lib.content_hash('1 + 1 =')}
  assert source_lib.content_hash('1 + 2 =') not in keys
  assert source_lib.content_hash('abc').startswith('ba7816bf8f01cfea')
