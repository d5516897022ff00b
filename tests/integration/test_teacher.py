"""A run with a teacher, from the command line on, and teachers that do not fit."""

import dataclasses
import json

import numpy as np
import pytest

from rlax_stack import assembly, command_line
from rlax_stack.errors import ConfigError
from rlax_stack.learner.teacher import Teacher
from rlax_stack.other_models import load_teacher, make_other_context

_BOXES = (
  '--config.objective.advantage=teacher',
  '--config.objective.trust_region=none',
  "--config.objective.regularisers=('kl_teacher(coef=0.1)',)",
)


@pytest.mark.slow
def test_a_run_learns_from_a_teacher(launch, toy, tmp_path):
  done = launch(*_BOXES, f'--config.learner.teacher={toy / "model"}', '--config.steps=2')
  assert done.returncode == 0, done.stdout
  (path,) = tmp_path.glob('*/metrics.jsonl')
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  found = [line['train/kl_teacher'] for line in lines if 'train/kl_teacher' in line]
  # At first the policy is the teacher, whose advantages are no more than what sampler and learner differ by.
  assert len(found) == 2 and abs(found[0]) < 1e-6 and np.isfinite(found[1])
  context = '--config.learner.teacher_context={prompt} {answer}'
  alone = launch(*_BOXES, context, '--config.steps=1', '--config.name=alone')
  assert alone.returncode == 0, alone.stdout
  lines = (tmp_path / 'alone' / 'metrics.jsonl').read_text().splitlines()
  (first,) = (value for line in lines if (value := json.loads(line).get('train/kl_teacher')))
  assert first > 1e-4  # told the answer, the same weights say something else
  refused = launch(*_BOXES)
  assert refused.returncode == 2
  assert 'compares with a teacher, but config.learner.teacher names none' in refused.stdout


def test_a_teacher_of_other_tokens_is_refused(toy_arguments):
  config = command_line.parse(['launch', *toy_arguments('unused')])[0]
  model = assembly.load_checked_model(config, {})
  learner = dataclasses.replace(config.learner, teacher=config.model.path)
  taught = dataclasses.replace(config, learner=learner)
  found = load_teacher(taught, model)
  assert found is not None and found.config == model.config
  assert load_teacher(config, model) is None and make_other_context(config, model, None) is None
  learner = dataclasses.replace(
    config.learner, teacher_context='{prompt}', teacher_context_tokens=model.config.max_context
  )
  with pytest.raises(ConfigError, match='tokens, and 2 after them exceed the context of'):
    make_other_context(dataclasses.replace(config, learner=learner), model, None)
  wide = dataclasses.replace(model.config, max_context=model.config.max_context + 2)
  far = dataclasses.replace(config, learner=learner)
  # The policy never reads what its teacher does.
  assert make_other_context(far, model, Teacher(wide, None)) is not None
  longer = dataclasses.replace(
    taught, rollout=dataclasses.replace(config.rollout, max_tokens=model.config.max_context)
  )
  roomy = dataclasses.replace(model, config=wide)
  with pytest.raises(ConfigError, match='samples may have 66 tokens, more than the context .* 64'):
    load_teacher(longer, roomy)

  class OneMore:
    def encode(self, text):
      return np.append(model.tokenizer.encode(text), 1)

  with pytest.raises(ConfigError, match="reads 'Solve 12 .* as other tokens than"):
    load_teacher(taught, dataclasses.replace(model, tokenizer=OneMore()))
