"""`portable-dit recipes`: list, show, validate, and the JSON Schema."""

from __future__ import annotations

import json as json_text
from dataclasses import replace
from typing import Annotated

import typer

from portable_dit import DEFAULT_RECIPE
from portable_dit.cli.options import JsonFlag, RecipeWish, recipe_flags
from portable_dit.errors import RecipeError, UserError

app = typer.Typer(
    help="Recipes: what there is, what one says, and whether it is right.", no_args_is_help=True
)


@app.command("list")
def list_recipes(
    text: Annotated[str, typer.Argument(help="Only those with it in their names, as in h200 or cpu/.")] = "",
    json: JsonFlag = False,
) -> None:
    """Name every recipe that is found by name."""
    from portable_dit.catalog import load_recipe, named_recipes

    named = {name: path for name, path in named_recipes().items() if text.lower() in name.lower()}
    if not named:
        raise RecipeError(f"{text!r}: in no recipe's name. `portable-dit recipes list` names all.")
    rows = [(name, load_recipe(path)) for name, path in named.items()]
    if json:
        listed = [
            {
                "name": name,
                "model": recipe.model,
                "backend": recipe.device.backend,
                "description": recipe.description,
            }
            for name, recipe in rows
        ]
        typer.echo(json_text.dumps(listed))
        return
    width = max(len(name) for name, _ in rows)
    for name, recipe in rows:
        typer.echo(f"{name:{width}}  {recipe.description}")


@app.command()
@recipe_flags
def show(
    wish: RecipeWish,
    named: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE", help="The recipe, if not by --recipe.")
    ] = None,
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the file as it is, to start a recipe of your own from.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Print every key of a recipe, its value and where it comes from."""
    if named is not None:
        if wish.ref not in (DEFAULT_RECIPE, named):
            raise RecipeError(f"two recipes: {named!r} and --recipe {wish.ref!r}. Say one of them.")
        wish = replace(wish, ref=named)
    recipe = wish.load()
    if yaml:
        if wish.overrides or json:
            raise RecipeError("--yaml: prints the file as it is. Leave --json and flags for keys out.")
        from portable_dit.catalog import find_recipe

        typer.echo(find_recipe(wish.ref).read_text(encoding="utf-8"), nl=False)
        return
    values, provenance = recipe.values(), recipe.provenance
    if json:
        keys = {key: {"value": value, "from": provenance[key]} for key, value in values.items()}
        typer.echo(json_text.dumps({"recipe": keys, "digest": recipe.digest}))
        return
    width = max(map(len, values))
    for key, value in values.items():
        typer.echo(f"{key:{width}}  {json_text.dumps(value):<28} {provenance[key]}")
    typer.echo(f"{'digest':{width}}  {recipe.digest}")


@app.command()
def validate(
    recipes: Annotated[list[str], typer.Argument(metavar="NAME|FILE...", help="Recipes to check.")],
) -> None:
    """Check recipes on their own and against the model they name; all mistakes are told."""
    mistakes = [(ref, _mistakes(ref)) for ref in recipes]
    for ref, found in mistakes:
        if found is None:
            typer.echo(f"{ref}: right")
    wrong = [found for _, found in mistakes if found]
    if wrong:
        raise RecipeError("\n".join(wrong))


def _mistakes(ref: str) -> str | None:
    """What is wrong with a recipe on its own and for its model, or None."""
    from portable_dit.catalog import read_spec

    try:
        recipe = RecipeWish(ref).load()
        read_spec(recipe)
    except UserError as error:
        return str(error)
    return None


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors and other tools."""
    from portable_dit.recipe import recipe_schema

    typer.echo(json_text.dumps(recipe_schema(), indent=2))
