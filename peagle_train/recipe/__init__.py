"""The recipe of a run: schema, loading with all faults at once, checks against the target."""

from peagle_train.recipe.checks import check_against_target
from peagle_train.recipe.load import LoadedRecipe, find_recipe, load_recipe, read_recipe
from peagle_train.recipe.schema import Recipe

__all__ = ["LoadedRecipe", "Recipe", "check_against_target", "find_recipe", "load_recipe", "read_recipe"]
