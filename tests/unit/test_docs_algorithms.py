"""docs/algorithms.md is generated, up to date, and every recipe names a test that holds it."""

from rlax_stack import docs_algorithms


def test_page_is_up_to_date():
  assert docs_algorithms.PAGE.read_text() == docs_algorithms.render(), 'run `make docs`'


def test_every_recipe_names_a_paper_and_a_test_that_is_there():
  recipes = docs_algorithms.read_recipes()
  assert {'grpo', 'dapo', 'gspo'} <= {recipe.name for recipe in recipes}
  for recipe in recipes:
    path, _, name = recipe.test.partition('::')
    assert name and name in (docs_algorithms.ROOT / path).read_text(), recipe.test
    assert recipe.paper.startswith('http') and recipe.config.name == recipe.name
